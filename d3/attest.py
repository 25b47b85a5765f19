"""`python -m d3.attest FILE [--sign KEY]`: a certificate that holds as an in-toto Statement, signed on request."""

import argparse
import os
import sys
from pathlib import Path

from d3.errors import D3Error, command
from d3.statement import sign, write_statement
from d3.verify import examine


@command
def main(argv: list[str] | None = None) -> int:
    """Write a certificate's statement; 0 written, 1 the certificate does not hold, 2 wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m d3.attest",
        description="Write a certificate as an in-toto Statement: plain, or signed as a DSSE envelope.",
        epilog="Check a signed one with: python -m d3.verify FILE --verify-key PUBLIC_KEY",
    )
    parser.add_argument("file", type=Path, help="the certificate, such as results/d3_determinism_2x2.json")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="a private key in PEM form, such as ed25519")
    options = parser.parse_args(argv)
    path, found = options.file, examine(options.file)
    if found.problems:
        raise D3Error(f"{path} does not hold: {found.problems[0]}", f"see: python -m d3.verify {path}", 1)
    made = sign(found.certificate, path, options.sign) if options.sign else write_statement(found.certificate, path)
    print(f"statement {os.path.relpath(made)}")
    if options.sign:
        print(f"next: python -m d3.verify {options.file} --verify-key PUBLIC_KEY")
    return 0


if __name__ == "__main__":
    sys.exit(main())
