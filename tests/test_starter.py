"""How boots start: a standby imports beside the boot before it and is a process of its own; a fork says so."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from d3 import starter as starting
from d3.boot import run
from d3.record import Boot, BootPlan
from d3.starter import Starter
from d3.store import LOG
from planned import plan, wrapper

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def starter() -> Iterator[Starter]:
    with Starter(shown=("fake",)) as made:
        yield made


class Line:
    """Boots one after the other, each in a folder of its own; `engines`: the process ids that were asked."""

    def __init__(self, folder: Path, starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.starter, self.python = folder, starter, wrapper(folder)
        self.engines: list[int] = []
        self.beside: list[int | None] = []
        prepare = starter.prepare

        def noted(engine: Any) -> None:
            prepare(engine)
            self.engines.append(engine.child.pids()[0])
            self.beside.append(starter._standby[0].child.pids()[0] if starter._standby else None)

        monkeypatch.setattr(starter, "prepare", noted)

    def plan(self, number: int, do: str = "", **changed: Any) -> BootPlan:
        made = plan("on", "0", do, transport="worker", python=self.python)
        return made.model_copy(update={"boot": number, **changed})

    def boot(self, now: BootPlan, then: BootPlan | None = None) -> Boot:
        self.starter.expect(then, self.log(then) if then else None, 0.1)
        return run(now, self.log(now).parent, starter=self.starter)

    def log(self, plan: BootPlan) -> Path:
        return self.folder / f"b{plan.boot}" / LOG


@pytest.fixture
def line(tmp_path: Path, starter: Starter, monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr(starting, "IMPORTED_GB", 0.1)
    return Line(tmp_path, starter, monkeypatch)


def test_the_next_boots_process_is_there_before_it_and_is_its_own(line: Line) -> None:
    plans = [line.plan(n) for n in range(3)]
    records = [line.boot(now, then).record for now, then in zip(plans, [*plans[1:], None], strict=True)]
    assert [(r.status, r.reason, r.leftovers) for r in records] == [("valid", "", ())] * 3
    assert [(r.start, r.coldness) for r in records] == [("plain", "L1"), ("standby", "L1"), ("standby", "L1")]
    assert line.beside == [line.engines[1], line.engines[2], None]
    assert len(set(line.engines)) == 3
    assert [[c.evidence for c in r.checks if c.name == "start"] for r in records] == [
        [],
        *[["standby: a new process of its own that had only imported; no device was initialised at its start"]] * 2,
    ]
    assert [r.timings.import_s for r in records] == [0.5] * 3
    assert [r.timings.weights_s for r in records] == [0.25] * 3
    assert len({r.requests[0].logprobs_sha256 for r in records}) == 1


@pytest.mark.parametrize("other", [{"python": "/bin/false"}, {"env": {"D3_FAKE_DO": "", "OMP_NUM_THREADS": "1"}}])
def test_a_standby_of_another_environment_is_not_taken(line: Line, other: dict[str, Any]) -> None:
    then = line.plan(1)
    changed = then.model_copy(update={"launch": then.launch.model_copy(update={**other, "python": line.python})})
    expected = then.model_copy(update={"launch": then.launch.model_copy(update=other)})
    line.boot(line.plan(0), expected)
    if "env" in other:
        changed = then
    assert line.boot(changed).record.start == "plain"
    assert line.engines[1] != line.beside[0]


def test_a_standby_that_no_boot_takes_leaves_nothing(line: Line) -> None:
    with line.starter:
        line.boot(line.plan(0), line.plan(1))
        (standby,) = line.beside
        assert psutil.pid_exists(standby)
        assert line.log(line.plan(1)).exists()
    assert not psutil.pid_exists(standby)
    assert not (line.folder / "b1").exists()


def test_a_standby_that_died_costs_its_boot_nothing(line: Line) -> None:
    line.boot(line.plan(0), line.plan(1))
    psutil.Process(line.beside[0]).kill()
    psutil.wait_procs([psutil.Process(line.beside[0])], timeout=5)
    record = line.boot(line.plan(1)).record
    assert (record.status, record.start) == ("valid", "plain")


def test_a_standby_that_touched_a_device_is_a_failed_boot(line: Line) -> None:
    then = line.plan(1, "touch_the_device")
    line.boot(line.plan(0), then)
    record = line.boot(then).record
    line_ = "boot: the device was initialised before 'go': CUDA device 0 has a context"
    assert (record.status, record.reason, record.failure.kind) == ("failed", line_, "environment")


def test_without_memory_to_spare_the_next_boot_starts_plainly(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting.psutil, "virtual_memory", lambda: SimpleNamespace(available=50e6))
    line.boot(line.plan(0), line.plan(1))
    assert line.beside == [None]
    assert line.boot(line.plan(1)).record.start == "plain"


def test_registered_ways_are_kept(line: Line) -> None:
    plain = [line.plan(n, start="plain") for n in range(2)]
    assert [line.boot(plain[0], plain[1]).record.start, line.beside[0]] == ["plain", None]
    alone = line.boot(line.plan(2, start="standby")).record
    assert (alone.status, alone.start) == ("valid", "standby")
    assert alone.checks[5].evidence.startswith("standby, registered standby: a new process of its own")
    line.starter._shown = ()
    line.boot(line.plan(3), line.plan(4))
    assert line.beside[-1] is None


def test_forks_come_out_of_one_server_and_are_named_as_such(line: Line) -> None:
    records = [line.boot(line.plan(n, start="fork")).record for n in range(2)]
    assert [(r.status, r.reason, r.start, r.coldness) for r in records] == [("valid", "", "fork", "L2")] * 2
    assert [r.leftovers for r in records] == [(), ()]
    assert len(line.starter._servers) == 1
    (server,) = line.starter._servers.values()
    assert psutil.Process(server.child.pids()[0]).is_running()
    assert len(set(line.engines)) == 2
    assert [r.timings.python_s for r in records] == [0.0] * 2
    plain = line.boot(line.plan(2, start="plain")).record
    assert [r.response for r in plain.requests] == [r.response for r in records[0].requests]


def test_a_fork_that_dies_is_recorded_like_any_engine(line: Line) -> None:
    record = line.boot(line.plan(0, "die_quietly", start="fork")).record
    assert (record.status, record.reason) == ("failed", "request: the engine process ended with code 3")


def test_a_server_that_cannot_start_is_a_failed_boot(line: Line) -> None:
    made = line.plan(0, start="fork")
    made = made.model_copy(update={"launch": made.launch.model_copy(update={"python": "/bin/false"})})
    record = line.boot(made).record
    assert (record.status, record.failure.stage, record.failure.kind) == ("failed", "launch", "environment")
    assert record.reason == "launch: no fork: the fork server: the engine process ended with code 1"
