"""What a person sees while a study runs: one live line in a terminal, plain lines in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

import build
from conftest import TESTS
from d3 import boot as booting
from d3 import console as module
from d3.console import Console
from planned import plan

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ROOT = TESTS.parent


def two_boots() -> None:
    """Two boots of the pretend engine, shown as a study's jobs show them; run in a process of its own."""
    study = build.registration(("on/0", "off/0"), boots=1)
    records = []
    for slot in study.order:
        console = Console(study, [r.timings.total_s for r in records], slot)
        asked = plan()
        with console.live(asked):
            found = booting.run(asked, Path(sys.argv[1]), console.phase)
        console.done(found.record, 0.4)
        records.append(found.record)


def command(folder: Path) -> list[str]:
    return [sys.executable, "-c", "import test_console as t; t.two_boots()", str(folder)]


def environment(**more: str) -> dict[str, str]:
    dropped = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    return {k: v for k, v in os.environ.items() if k not in dropped} | {"PYTHONPATH": path, **more}


def in_terminal(folder: Path, width: int, **more: str) -> str:
    """The output in a pseudo-terminal of that width, escapes and all."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    env = environment(**{"TERM": "xterm-256color", **more})
    process = subprocess.Popen(command(folder), env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    out = b""
    try:
        while chunk := os.read(master, 4096):
            out += chunk
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(60) == 0, out
    return out.decode()


@pytest.mark.parametrize("name", ["worker", "invariant_probe"])
def test_a_script_that_waits_for_another_program_says_so_to_a_person(name: str) -> None:
    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", f"d3.{name}"],
        cwd=ROOT,
        stdin=slave,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(master)
    os.close(slave)
    assert done.returncode == 2
    assert re.fullmatch(r"error: this waits for JSON lines.*, not for a person; .*python -m d3\.\w+.*\n", done.stderr)


def lines(raw: str) -> list[str]:
    """What was on the screen at some time, line by line, without the escapes."""
    return [line for line in re.split(r"[\r\n]+", ESCAPES.sub("\r", raw)) if line.strip()]


def test_a_terminal_shows_boot_phase_requests_elapsed_and_time_left(tmp_path: Path) -> None:
    raw = in_terminal(tmp_path, 120)
    shown = lines(raw)
    first = [line for line in shown if line.startswith("[1/2] boot 0 apc=")]
    assert any(re.search(r": engine starting, \d+ s$", line) for line in first)
    assert any(re.search(r": \w+ W1, request \d of 8, \d+ s$", line) for line in first)
    second = [line for line in shown if line.startswith("[2/2] boot 0 apc=")]
    assert any(re.search(r": \w+ C2, request \d of 8, \d+ s, about \d+ s left$", line) for line in second)
    assert [line for line in shown if ": valid in 0 s" in line] == [first[-1], second[-1]]
    assert ": begins" not in raw
    assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") == 2  # the cursor comes back
    assert not re.search(r"\x1b\[[0-9;]+m", raw)  # nothing is said by colour


def test_a_narrow_terminal_keeps_the_live_line_on_one_line(tmp_path: Path) -> None:
    live = [line for line in lines(in_terminal(tmp_path, 60, NO_COLOR="1")) if re.match(r"\[2/2\].*/8", line)]
    assert any(re.search(r": long W1 \d/8, \d+ s, \d+ s left$", line) for line in live)
    assert max(map(len, live)) < 60


def test_a_dumb_terminal_and_a_pipe_get_plain_lines_and_no_control_characters(tmp_path: Path) -> None:
    piped = subprocess.run(
        command(tmp_path), env=environment(FORCE_COLOR="1"), capture_output=True, text=True, check=True
    )
    assert piped.stderr == ""
    for raw in (piped.stdout, in_terminal(tmp_path, 60, TERM="dumb").replace("\r\n", "\n")):
        assert not [c for c in raw if not c.isprintable() and c != "\n"]
        assert [re.sub(r" apc=\w+ invariant=0|\d+ (?=s)", "", line) for line in raw.splitlines()] == [
            "[1/2] boot 0: begins", "[1/2] boot 0: valid in s, about s left",
            "[2/2] boot 0: begins, about s left", "[2/2] boot 0: valid in s",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, "[1/8] boot 0 apc=on invariant=0: long W1, request 2 of 8, 4 s, about 76 s left"),
        (70, "[1/8] boot 0 apc=on invariant=0: long W1 2/8, 4 s, 76 s left"),
        (55, "[1/8] boot 0 on/0: long W1 2/8, 4 s, 76 s left"),
        (45, "[1/8] boot 0: long W1 2/8, 4 s, 76 s left"),
        (20, "[1/8] boot 0: long W"),
    ],
)
def test_what_matters_least_goes_first_when_the_line_gets_narrow(
    width: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = build.registration(("on/0",), boots=8)
    valid = build.boots(study)[0].record
    valid = valid.model_copy(update={"timings": valid.timings.model_copy(update={"total_s": 10.0})})
    console = Console(study, [valid.timings.total_s], study.order[0])
    console.rich = RichConsole(width=width + 1)
    console.began, console.words = 100.0, "long W1"
    console.requests = ("long C1", "long W1", *(f"short {i}" for i in range(6)))
    monkeypatch.setattr(module.time, "monotonic", lambda: 104.0)
    assert console._line().plain == shown
