"""The benchmark's arithmetic and page, and what counts as left behind."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import build
from d3 import bench, leftovers
from d3.bench_report import LOOKS, Bench, Parts, Run, chart, page, targets
from d3.errors import D3Error
from d3.leftovers import Before, Growth, Repeated
from d3.record import BootRecord, Timings

EACH = {
    "python_s": 0.5,
    "import_s": 8.0,
    "weights_s": 1.0,
    "ready_s": 3.0,
    "first_s": 0.5,
    "rest_s": 6.5,
    "stop_s": 0.25,
}


def measured(name: str, whole_s: float, own_s: float = 0.25, import_s: float = 8.0, left: tuple[str, ...] = ()) -> Run:
    parts = Parts(**{**EACH, "import_s": import_s}, own_s=own_s)
    return Run(name=name, boots=4, whole_s=whole_s, cpu_s=100.0, parts=parts, left=left)


def found(plain_s: float = 81.0, standby_s: float = 47.0, own_s: float = 0.25) -> Bench:
    return Bench(what="4 boots", machine="2 cores", load=0.5, bare=measured("bare loop", 80.0, 0.0),
                 plain=measured("D3, plain start", plain_s, own_s),
                 standby=measured("D3, standby", standby_s, own_s, 0.5))  # fmt: skip


def record(number: int, start: str = "plain", **timings: float) -> BootRecord:
    began = datetime(2026, 1, 31, tzinfo=UTC) + timedelta(seconds=20 * number)
    study = build.registration(boots=2)
    made = build.boot(study, "on/0", 0, {"short": "aaaaaaaa"}).record
    base = {"boot_s": 12.5, "requests_s": 7.0, "stop_s": 0.25, "total_s": 19.75, "python_s": 0.5, "import_s": 8.0,
            "weights_s": 1.0, "ready_s": 3.0}  # fmt: skip
    return made.model_copy(
        update={"start": start, "started_at": began.isoformat(), "timings": Timings(**{**base, **timings})}
    )


def test_the_phases_of_a_boot_add_up_to_its_time_and_the_gap_to_the_next() -> None:
    plain, standby = bench.parts([record(1, "standby", boot_s=5.0, total_s=12.25), record(0)])
    first = record(0).requests[0].latency_s
    assert plain == Parts(**{**EACH, "first_s": first, "rest_s": 7.0 - first}, own_s=0.25)
    assert plain.total() == pytest.approx(20.0)
    assert (standby.python_s, standby.import_s, standby.ready_s) == (0.0, 1.0, 3.0)  # it waited one second for the rest


def test_a_boot_that_failed_or_counts_no_phases_is_no_measurement() -> None:
    bad = record(0).model_copy(update={"status": "failed", "reason": "boot: no"})
    with pytest.raises(D3Error, match="was failed boot: no, or its engine counts no phases"):
        bench.parts([bad])
    with pytest.raises(D3Error, match="benchmark an engine of transport worker"):
        bench.parts([record(0).model_copy(update={"timings": Timings(boot_s=1, requests_s=1, stop_s=0, total_s=2)})])


@pytest.mark.parametrize(
    ("plain_s", "standby_s", "own_s", "missed"),
    [(82.4, 48.0, 0.5, 0), (82.5, 48.0, 0.5, 1), (82.4, 48.1, 0.5, 1), (82.4, 48.0, 0.51, 1), (90, 60, 1, 3)],
)
def test_each_target_is_met_up_to_its_figure(plain_s: float, standby_s: float, own_s: float, missed: int) -> None:
    bench = found(plain_s, standby_s, own_s)
    assert targets(bench).count("**missed**") == missed
    assert bench.holds() == (missed == 0)


def test_the_page_names_every_phase_and_what_was_left() -> None:
    text = page(found(), "img/bench.svg")
    assert all(f"| {words}, a boot |" in text for words, _, _ in LOOKS.values())
    assert "| **all 4 boots** | **80.0** | **81.0** | **47.0** |" in text
    assert "is 78.0 s." in text  # the floor: 4 x (19.75 - 0.25)
    assert "temporary files: nothing. Shared" in text
    words = (
        "process python",
        f"temporary file x_{'0f' * 16}",
        f"temporary file x_{'1e' * 16}",
        "shared memory tmpab12_xyz",
    )
    left = found().model_copy(update={"standby": measured("D3, standby", 47.0, left=words)})
    said = "temporary files: 1 x process python, 2 x temporary file x_*, 1 x shared memory tmp*. Shared"
    assert said in page(left, "x.svg")


def test_equal_figures_give_an_equal_picture() -> None:
    picture = chart(found())
    assert picture == chart(found())
    assert all(words in picture.decode() for words, _, _ in LOOKS.values())


def test_what_is_new_is_left_behind(tmp_path: Path) -> None:
    before = Before(tmp_path)
    assert before.left() == ()
    with subprocess.Popen(["sleep", "60"]) as child:
        (tmp_path / "d3-x").touch()
        assert before.left() == ("process sleep", "temporary file d3-x")
        assert before.left([child.pid]) == ("temporary file d3-x",)
        child.kill()


def test_growth_is_counted_from_where_caches_are_full() -> None:
    growth = Growth(boots=300, mib=(100.0, 110.0, 110.5, 111.0, 111.5, 112.0))
    assert growth.per_boot() == pytest.approx(2 * 1024 / 200)
    text = leftovers.page(None, growth)
    assert "boot 100 on the process grew by 10.2 KiB a boot" in text
    assert "| 300 | 112 |" in text


def test_the_page_of_repeated_boots_says_what_each_left() -> None:
    repeated = Repeated(engine="fake 1.0", boots={"plain": 2, "fork": 1}, left=("boot 1 (fork): process x",), unlike=(),
                        first_mib=90, last_mib=91, first_files=9, last_files=9)  # fmt: skip
    text = leftovers.page(repeated, None)
    assert "## 3 boots of fake 1.0\n\n2 by plain, 1 by fork, in turn." in text
    assert "- left: boot 1 (fork): process x\n- boots that were not valid: none" in text
