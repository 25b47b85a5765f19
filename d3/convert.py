"""Turn a packaged GGUF file into a plain bf16 checkpoint: run by the engine's Python, `convert.py PACKAGE FILE OUT`."""

import importlib.util
import os
import sys

sys.path[:] = [p for p in sys.path if os.path.realpath(p or ".") != os.path.dirname(os.path.realpath(__file__))]

import argparse
from pathlib import Path


def convert(package: str, file: str, out: str) -> None:
    """Read FILE out of PACKAGE's folder, dequantise it, and save weights, configuration and tokenizer into OUT."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"the package {package} is not installed here")
    folder = str(Path(spec.origin).parent)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    # The weights are plain bf16 now; without this, transformers still takes the model for a quantised one.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.convert",
        description="Turn a packaged GGUF file into a plain bf16 checkpoint, by the engine's own Python.",
        epilog="python -m d3.engine install runs it; it needs torch and transformers.",
    )
    parser.add_argument("package", help="the installed package that holds the file")
    parser.add_argument("file", help="the GGUF file's name in it")
    parser.add_argument("out", help="the folder to write")
    options = parser.parse_args(argv)
    convert(options.package, options.file, options.out)


if __name__ == "__main__":
    main()
