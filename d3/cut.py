"""Cut texts to exact token counts: run by the engine's Python, `cut.py MODEL`, JSON in and out."""

import os
import sys

sys.path[:] = [p for p in sys.path if os.path.realpath(p or ".") != os.path.dirname(os.path.realpath(__file__))]

import argparse
import json
from collections.abc import Callable, Sequence

REACH = 24


def cut(text: str, length: int, ends: Sequence[int], count: Callable[[str], int]) -> str:
    """The beginning of `text` whose whole prompt has `length` tokens.

    `ends`: where each token of the text ends, in characters; `count`: tokens of the whole prompt, template included. A
    cut inside a word can be read as other tokens than the text's own, so ends near the expected one are tried in turn.
    """
    expected = length - count("")
    near = range(max(0, expected - REACH), min(len(ends), expected + REACH))
    for i in sorted(near, key=lambda i: abs(i + 1 - expected)):
        part = text[: ends[i]]
        if not part[-1].isspace() and count(part) == length:
            return part
    sys.exit(f"no beginning of the text gives a prompt of {length} tokens; the text has {len(ends)}")


def cuts(model: str, system: str, texts: Sequence[str], lengths: Sequence[int]) -> list[list[str]]:
    """Per length its beginning of each text, measured as the worker sends a prompt: through the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def count(part: str) -> int:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": part}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        return len(ids["input_ids"] if hasattr(ids, "keys") else ids)

    ends = [[end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]] for text in texts]
    return [[cut(text, n, its, count) for text, its in zip(texts, ends, strict=True)] for n in lengths]


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.cut",
        description="Cut texts to exact token counts, by the engine's own Python. Reads and writes JSON.",
        epilog="python -m d3.cut_prompts runs it; it needs transformers.",
    )
    parser.add_argument("model", help="the folder that holds the tokenizer and its chat template")
    options = parser.parse_args(argv)
    asked = json.load(sys.stdin)
    json.dump(cuts(options.model, asked["system"], asked["texts"], asked["lengths"]), sys.stdout)


if __name__ == "__main__":
    main()
