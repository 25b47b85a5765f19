"""`python -m d3.cut_prompts`: a prompt of every length of interest, cut from the texts in `conf/prompts/lengths/`.

Lengths are counted with the model's tokenizer and chat template, which only the engine's own Python has.
"""

import argparse
import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from d3.errors import D3Error, command
from d3.install import engine_python, model_dir
from d3.store import root, write_atomic

SYSTEM = "Be brief."
MULTIPLES = (32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
COARSE = (640, 896, 1280, 1536, 1792, 2000)
HEAD = """\
# Two texts, each cut to every length: m-1, m, m+1, m+2 and one between, around multiples m of cache blocks and kernel
# tiles, coarser above 512. The number in an id is the prompt's exact length in tokens with SmolLM2's chat template.
# Written by `python -m d3.cut_prompts` from the texts in conf/prompts/lengths; change those, or the command.
"""


def prompt_lengths() -> tuple[int, ...]:
    """Lengths in tokens, ascending: around each multiple up to 512 (with the middle to the next), then coarser."""
    fine = [m for m in MULTIPLES if m <= 512]
    around = {m + d for m in fine for d in (-1, 0, 1, 2)} | {m + 1 for m in MULTIPLES} | set(MULTIPLES)
    between = {(m + n) // 2 for m, n in zip(fine, MULTIPLES[1:], strict=False)}
    return tuple(sorted(around | between | set(COARSE)))


def source_texts() -> dict[str, str]:
    """The texts by name, each as one line."""
    files = sorted((root() / "conf" / "prompts" / "lengths").glob("*.txt"))
    return {file.stem: " ".join(file.read_text(encoding="utf-8").split()) for file in files}


def cut_texts(python: str, model: str, texts: Sequence[str], lengths: Sequence[int]) -> list[list[str]]:
    """Per length the beginning of each text that makes a prompt of exactly that many tokens. Raises D3Error."""
    asked = json.dumps({"system": SYSTEM, "texts": list(texts), "lengths": list(lengths)})
    command = [python, str(Path(__file__).with_name("cut.py")), model]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise D3Error(f"the texts could not be cut: {last}", "lengthen the text, or leave the length out")
    found: list[list[str]] = json.loads(done.stdout)
    return found


def as_yaml(name: str, prompts: Sequence[tuple[str, str]]) -> str:
    """A set of prompts (id, text) as YAML. JSON's quoting is YAML's, where a line end inside it is a space."""
    lines = [HEAD + f"name: {name}", "items:"]
    for prompt, text in prompts:
        quoted = textwrap.fill(json.dumps(text, ensure_ascii=False), 116, subsequent_indent="        ",
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
        lines += [f"  - id: {prompt}", "    messages:", f"      - {{role: system, content: {SYSTEM}}}",
                  "      - role: user", "        content:", f"          {quoted}"]  # fmt: skip
    return "\n".join(lines) + "\n"


def made() -> str:
    """The file `conf/prompts/lengths.yaml`, made with the installed CPU engine and the default model."""
    model = OmegaConf.load(root() / "conf" / "model" / "smollm2_135m.yaml")
    texts = source_texts()
    cut = cut_texts(
        engine_python("vllm_cpu", "vllm_cpu", None),
        model_dir(model.name, model.package, model.path),
        list(texts.values()),
        prompt_lengths(),
    )
    pairs = zip(prompt_lengths(), cut, strict=True)
    return as_yaml("lengths", [(f"{t}-{n}", part) for n, parts in pairs for t, part in zip(texts, parts, strict=True)])


@command
def main(argv: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.cut_prompts",
        description="Write conf/prompts/lengths.yaml: the texts beside it, cut to exact lengths in tokens.",
        epilog="It needs the CPU engine: python -m d3.engine install vllm_cpu",
    )
    parser.add_argument("--out", type=Path, default=root() / "conf" / "prompts" / "lengths.yaml",
                        help="the file to write (default: conf/prompts/lengths.yaml)")  # fmt: skip
    options = parser.parse_args(argv)
    write_atomic(options.out, made())
    print(f"{options.out}: {len(prompt_lengths())} lengths of {len(source_texts())} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
