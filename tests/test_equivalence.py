"""A standby is the default only for engines of which the committed certificate shows that it changes no hash."""

from pathlib import Path

import pytest

from d3 import equivalence
from d3.across import across
from d3.compare import read_side
from d3.errors import D3Error
from d3.starter import SHOWN
from d3.store import root

CERTIFICATE = root() / equivalence.OUT
ON_A_GPU = root() / "results/h200_equivalence.json"


def engines(path: Path) -> set[str]:
    certificate = read_side(path).certificate
    assert certificate.totals.counted == len(certificate.registration.order)
    return {c.settings["engine"]["name"] for c in certificate.registration.cells}


def test_every_engine_that_starts_by_standby_has_a_certificate() -> None:
    assert set(SHOWN) == engines(CERTIFICATE) | engines(ON_A_GPU)


def test_on_a_gpu_a_standby_changes_no_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert equivalence.main(["--read", "--out", str(ON_A_GPU)]) == 0
    said = capsys.readouterr().out
    assert "start=standby against plain, attention=default: the same hashes cell by cell, in 24 of 24 places\n" in said
    assert read_side(ON_A_GPU).certificate.coldness == {"L1": 8}


def test_on_the_cpu_no_way_to_start_changes_a_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert equivalence.main(["--read", "--out", str(CERTIFICATE)]) == 0
    said = capsys.readouterr().out
    assert "start: start=standby against plain, at_once=1: the same hashes cell by cell, in 24 of 24 places\n" in said
    assert said.count("gate: passes") == 2
    assert read_side(CERTIFICATE).certificate.coldness == {"L1": 16, "L2": 8}


def test_a_way_that_changes_a_response_is_named_and_says_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_other(side, key):
        found = across(side, key)
        pairing = found.pairings[0]
        spot = pairing.spots[0].model_copy(update={"responses": "other"})
        changed = pairing.model_copy(update={"spots": (spot, *pairing.spots[1:])})
        return found.model_copy(update={"pairings": (changed, *found.pairings[1:])})

    monkeypatch.setattr(equivalence, "across", one_other)
    assert equivalence.judged(CERTIFICATE) == 1
    assert "other responses in 1 of 24 places" in capsys.readouterr().out


def test_a_certificate_of_one_way_answers_nothing() -> None:
    with pytest.raises(D3Error, match="sweeps neither start nor at_once; run: python -m d3.equivalence"):
        equivalence.judged(root() / "results/d3_determinism_2x2.json")


def test_a_step_that_fails_stops_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd) -> None:
    monkeypatch.setenv("D3_RUNS", str(tmp_path))
    assert equivalence.main(["start=quick", "--out", str(tmp_path / "x.json")]) == 2
    assert "error: planning failed; see above" in capfd.readouterr().err
    assert not (tmp_path / "x.json").exists()
