"""Seconds and boots an hour come from the records of a certificate."""

from pathlib import Path

import pytest

from d3.compare import read_side
from d3.speed import main, speeds

RESULTS = Path(__file__).parent.parent / "results"


def test_whole_time_is_from_the_first_start_to_the_last_end_of_each_group() -> None:
    records = [b.record for b in read_side(RESULTS / "h200_at_once.json").boots]
    one = records[0].model_copy(update={"started_at": "2026-11-30T10:00:00.000+00:00"})
    one = one.model_copy(update={"timings": one.timings.model_copy(update={"total_s": 30.0, "boot_s": 10.0})})
    two = one.model_copy(update={"started_at": "2026-11-30T10:00:10.000+00:00"})
    (speed,) = speeds("made_up", [one, two])
    assert (speed.boots, speed.whole_s, speed.per_hour, speed.start_s) == (2, 40.0, 180.0, 10.0)
    skipped = one.model_copy(update={"status": "skipped"})
    assert speeds("made_up", [one, two, skipped]) == [speed]
    assert [(s.at_once, s.boots) for s in speeds("h200_at_once", records)] == [(1, 4), (2, 4), (4, 4)]


def test_the_command_prints_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(RESULTS / "h200_headline.json")]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "| h200_headline | 12 | 24 | 288 | 111 | 776 | 40.9 | 12.2 |"
    assert main([str(RESULTS / "none.json")]) == 2
    assert "error: " in capsys.readouterr().err
