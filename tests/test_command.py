"""Every command line ends in one line and a code, whoever stops it: an error, Ctrl-C, a reader that has enough."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from d3.errors import D3Error, command

ROOT = Path(__file__).parent.parent
OTHERWISE = {  # which of them say more, or run beside an engine
    "d3/__main__.py",
    "d3/reproduce.py",
    "d3/convert.py",
    "d3/cut.py",
    "d3/invariant_probe.py",
    "d3/worker.py",
}


def raising(error: BaseException) -> int:
    @command
    def main(argv: list[str] | None = None) -> int:
        raise error

    return main([])


def test_an_error_is_one_line_without_control_characters_and_has_its_own_code(capsys: pytest.CaptureFixture) -> None:
    assert raising(D3Error("no \x1b[31mfile", "name\none", 7)) == 7
    assert capsys.readouterr().err == "error: no \\x1b[31mfile; name\\none\n"


def test_ctrl_c_is_130_in_one_line(capsys: pytest.CaptureFixture) -> None:
    assert raising(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "error: stopped by the user\n"


def test_another_error_is_a_bug_and_is_shown_whole() -> None:
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())


def test_a_reader_that_has_enough_gets_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = ["d3.compare", "results/vllm_cpu_flag.json", "results/vllm_cpu_flag.json"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 141


def test_every_command_line_is_one_of_these() -> None:
    mains = {}
    for path in (ROOT / "d3").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                mains[str(path.relative_to(ROOT))] = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
    assert len(mains) > 20
    assert {name for name, found in mains.items() if found != ["command"]} == OTHERWISE
