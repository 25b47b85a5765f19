"""Planned boots on a host: in groups of as many side by side as the study registered, with real processes."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Home
from d3 import host
from d3.errors import D3Error
from d3.model import model_digest
from d3.record import BootPlan, BootRecord, canonical_json
from d3.store import PLAN, RECORD, load, write_atomic
from planned import plan


def planned(position: int, at_once: int | None, **changed: object) -> BootPlan:
    return plan().model_copy(
        update={"position": position, "boot": position, "at_once": at_once, "boot_id": f"0/{position}", **changed}
    )


def folder_of(folder: Path, plans: list[BootPlan], model: Path) -> Path:
    """The plans as planning leaves them: this host's paths open, the model's digest registered."""
    for one in plans:
        launch = one.launch.model_copy(update={"python": host.PYTHON, "model_path": host.MODEL})
        found = one.model_copy(update={"launch": launch, "model_digest": model_digest(str(model))})
        write_atomic(folder / f"p{one.position}" / PLAN, canonical_json(found))
    return folder


def records(folder: Path) -> dict[int, BootRecord]:
    found = [load(BootRecord, path) for path in folder.glob(f"*/{RECORD}")]
    return {r.position: r for r in found}


def ends(record: BootRecord) -> tuple[datetime, datetime]:
    began = datetime.fromisoformat(record.started_at)
    return began, began + timedelta(seconds=record.timings.total_s)


@given(st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 9))
def test_groups_hold_every_plan_once_the_fewest_side_by_side_first(numbers: list[int | None], given: int) -> None:
    plans = [(planned(i, n), Path(str(i))) for i, n in enumerate(numbers)]
    free = all(n is None or n == given for n in numbers)
    groups = host.grouped(plans, given if free else None)
    assert list(groups) == sorted(groups)
    assert sorted(p.position for group in groups.values() for p, _ in group) == list(range(len(numbers)))
    for together, group in groups.items():
        assert {p.at_once or (given if free else 1) for p, _ in group} == {together}
        assert [p.position for p, _ in group] == sorted(p.position for p, _ in group)


def test_a_number_that_contradicts_the_study_is_refused_before_any_boot(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = folder_of(home.folder / "plans", [planned(0, 2), planned(1, 4)], home.model)
    assert host.main([str(plans), "--model", str(home.model), "--at-once", "8"]) == 2
    said = "error: --at-once 8: the study registered at_once=2, 4; leave --at-once out; each plan says its own\n"
    assert capsys.readouterr() == ("", said)
    assert not records(plans)


def test_a_folder_without_plans_and_no_boot_at_all_are_refused(home: Home) -> None:
    with pytest.raises(D3Error, match="has no plans; name the folder that planning printed"):
        host.read_plans(home.folder)
    with pytest.raises(D3Error, match="--at-once 0 runs no boot"):
        host.grouped([], 0)


def test_each_engine_may_have_a_python_of_its_own() -> None:
    found = host.pythons(["/a/python", "vllm_0_33=/b/python"], {"vllm", "vllm_0_33"})
    assert (found.of("vllm"), found.of("vllm_0_33")) == ("/a/python", "/b/python")
    assert host.pythons(["/opt/v=1/python"], {"vllm"}).of("vllm") == "/opt/v=1/python"
    with pytest.raises(D3Error, match=r"--python vllm_033=/b: no plan has the engine vllm_033; .* are: vllm$"):
        host.pythons(["vllm_033=/b"], {"vllm"})


@pytest.mark.usefixtures("nothing_left")
def test_a_cells_compile_cache_lies_beside_the_boots_and_serves_both(home: Home) -> None:
    launch = plan(compile_cache=f"{host.CACHES}/base__cell").launch
    plans = folder_of(home.folder / "boots", [planned(n, None, launch=launch) for n in range(2)], home.model)
    assert host.main([str(plans), "--model", str(home.model)]) == 0
    found = records(plans)
    assert [r.status for r in found.values()] == ["valid", "valid"]
    assert len({r.compile_cache and r.compile_cache.sealed for r in found.values()} - {None}) == 1
    assert (home.folder / "caches" / "base__cell" / "inductor" / "kernel").exists()


@pytest.mark.usefixtures("nothing_left")
def test_groups_run_one_after_the_other_and_every_boot_says_how_many_it_shared_the_device_with(home: Home) -> None:
    plans = folder_of(
        home.folder / "plans", [planned(0, 2), planned(1, 1), planned(2, 2), planned(3, None)], home.model
    )
    assert host.main([str(plans), "--model", str(home.model)]) == 0
    found = records(plans)
    assert {p: r.environment["boots_at_once"] for p, r in found.items()} == {0: "2", 1: "1", 2: "2", 3: "1"}
    assert {r.status for r in found.values()} == {"valid"}
    assert [c.held for c in found[0].checks if c.name == "at_once"] == [True]
    assert not [c for c in found[3].checks if c.name == "at_once"]
    last_alone = max(ends(found[p])[1] for p in (1, 3))
    assert last_alone <= min(ends(found[p])[0] for p in (0, 2)) + timedelta(milliseconds=1)
    assert host.main([str(plans), "--model", str(home.model)]) == 0  # all have a record: nothing to run
    assert records(plans) == found
