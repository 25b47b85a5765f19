"""`python -m d3.engine check`: what one boot shows of an engine, and the exit code."""

import json
from pathlib import Path

import pytest

from conftest import FAKE, TESTS, Home
from d3.engine_check import main
from planned import speaker

pytestmark = pytest.mark.usefixtures("nothing_left")


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, tuple[bool, str]]]:
    code = main(["check", *words, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["study"] == (code == 0)
    return code, {c["name"]: (c["has"], c["evidence"]) for c in said["capabilities"]}


def other(home: Home, engine: str, do: str = "") -> list[str]:
    """The words that check a committed engine's YAML with the pretend engine in its dialect."""
    program = speaker(home.folder, engine.removesuffix("_serve"), do)
    return [engine, f"engine.python={program}", "engine.version='1.0'",
            f"hydra.searchpath=[file://{TESTS}/conf]", "prompts=fake", "model=fake"]  # fmt: skip


def test_an_engine_with_all_that_a_study_needs(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = checked(capsys, "fake", *(w for w in FAKE if not w.startswith("engine=")))
    assert code == 0
    assert {name for name, (has, _) in found.items() if not has} == set()
    assert found["cold again"][1] == "by salt: cache_salt"
    assert found["cached tokens"][1].startswith("of 80 prompt tokens: C1 0, W1 64, W2 64, C2 0")
    assert not (home.runs / "studies").exists()


def test_llama_cpp_is_made_cold_by_its_reset_and_has_no_mode(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = checked(capsys, *other(home, "llama_cpp"))
    assert code == 0
    assert {name for name, (has, _) in found.items() if not has} == {"prompt ids", "invariant mode"}
    assert found["cold again"] == (True, "by reset: POST /slots/0?action=erase")
    assert found["block size"][1] == "1, as its YAML says"
    assert found["invariant mode"][1] == "llama.cpp has no batch-invariant mode"


def test_a_reset_that_does_not_work_is_found_out(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = checked(capsys, *other(home, "llama_cpp", "ignore_reset"))
    assert (code, found["cold again"][0], found["warm hits"][0]) == (1, False, True)


def test_what_is_missing_is_named(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *other(home, "transformers_serve")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == (
        "no study can be run on it; missing: version, cached tokens, warm hits, cold again, cache switch"
    )
    assert any(line.startswith("cold again         MISSING  neither salt nor reset in its YAML") for line in said)
    assert any(line.startswith("token ids          no ") for line in said)


def test_an_engine_that_does_not_answer_says_why(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = checked(capsys, *other(home, "sglang", "die_in_boot"))
    assert (code, found) == (1, {"answers": (False, "boot: ValueError: no available memory for the cache blocks")})


def test_wrong_use_is_one_line(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nope"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no engine/nope; known: ")
    assert main(["install", "sglang"]) == 2
    assert "engine sglang has no lock, so its environment is yours to make" in capsys.readouterr().err
    assert not (Path(home.folder) / "cache").exists()
