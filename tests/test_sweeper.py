"""The sweeper: whatever the command line's order, jobs run in the registered one."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import build
from conftest import Home
from d3.errors import D3Error
from d3.registration import Registration
from d3.store import save_registration
from hydra_plugins.d3_sweeper import StudySweeper

STUDY = build.registration(boots=3)
AXES = ["boot=range(3)", "apc=on,off", "invariant=0,1"]


def split(*words: str, batch: int | None = None) -> list[list[list[str]]]:
    return StudySweeper.split_arguments(OverridesParser.create().parse_overrides(list(words)), batch)


def places(jobs: list[list[str]]) -> list[tuple[int, str]]:
    found = [dict(word.split("=", 1) for word in job) for job in jobs]
    return [(int(j["boot"]), f"apc={j['apc']} invariant={j['invariant']}") for j in found]


def registered(study: Registration) -> list[tuple[int, str]]:
    return [(s.boot, s.cell) for s in study.order]


@pytest.fixture
def on_disk(home: Home) -> str:
    save_registration(STUDY)
    return f"registration={STUDY.id()}"


def test_jobs_run_in_the_registered_order(on_disk: str) -> None:
    # The registration's cells are on/0 off/0 on/1 off/1; those of this sweep come as the product makes them.
    (jobs,) = split("boot=range(3)", "invariant=0,1", "apc=on,off", on_disk)
    assert places(jobs) == registered(STUDY)


def test_batches_keep_the_order(on_disk: str) -> None:
    batches = split("boot=range(3)", "invariant=0,1", "apc=on,off", on_disk, batch=5)
    assert [len(b) for b in batches] == [5, 5, 2]
    assert places([job for batch in batches for job in batch]) == registered(STUDY)


def test_without_a_registration_the_product_is_as_it_is() -> None:
    (jobs,) = split(*AXES)
    assert places(jobs)[:3] == [(0, "apc=on invariant=0"), (0, "apc=on invariant=1"), (0, "apc=off invariant=0")]


def test_a_boot_that_is_not_registered_comes_last(on_disk: str) -> None:
    (jobs,) = split("boot=7,0", "invariant=0,1", "apc=on,off", on_disk)
    assert {job[0] for job in jobs[-4:]} == {"boot=7"}


def test_a_registration_that_is_not_there_is_an_error_of_ours(home: Home) -> None:
    with pytest.raises(D3Error, match=r"registration\.json does not exist"):
        split(*AXES, f"registration={'0' * 64}")
