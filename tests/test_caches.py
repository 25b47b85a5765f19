"""A cell's warmed compile cache: filled by engines of its own, sealed, and the same at every boot or it is void."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3.boot import run
from d3.caches import digest, state
from d3.machine import AT_ONCE
from d3.record import BootPlan, BootRecord, canonical_json
from d3.store import LOG
from planned import plan, wrapper

pytestmark = pytest.mark.usefixtures("nothing_left")


class Cell:
    """Boots of one cell, whose cache lies in `cache`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "caches" / "base__apc-on_invariant-0"

    def plan(self, do: str = "", **changed: object) -> BootPlan:
        words = {"transport": "worker", "python": wrapper(self.folder), "compile_cache": str(self.cache)}
        return plan("on", "0", do, **{**words, **changed})  # type: ignore[arg-type]

    def boot(self, number: int = 0, do: str = "") -> BootRecord:
        return run(self.plan(do), self.folder / f"b{number}").record

    def starts(self) -> int:
        return len(self.cache.with_suffix(".starts").read_text().splitlines())

    def files(self) -> set[str]:
        return {p.name for p in self.cache.rglob("*") if p.is_file()}


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    return Cell(tmp_path)


def state_check(record: BootRecord) -> tuple[bool, str]:
    (found,) = [(c.held, c.evidence) for c in record.checks if c.name == "cache_state"]
    return found


def test_every_boot_finds_what_engines_before_the_first_left(cell: Cell) -> None:
    records = [cell.boot(n) for n in range(2)]
    assert [(r.status, r.reason, r.leftovers) for r in records] == [("valid", "", ())] * 2
    assert cell.starts() == 4  # two to warm it, of which the second added nothing, then the boots
    one, two = (r.compile_cache for r in records)
    assert one is not None
    assert one == two
    assert one.sealed == one.before == one.after == digest(state(cell.cache))
    assert (one.files, one.rounds, one.mib) == (1, 2, 0.0)
    seen = f"{one.sealed[:12]} sealed, {one.sealed[:12]} at the start, {one.sealed[:12]} at the end; 1 files, 0.0 MiB"
    assert [state_check(r) for r in records] == [(True, f"compile cache of this cell: {seen}")] * 2
    assert (cell.folder / "b0" / LOG).exists()
    assert records[0].timings.total_s < records[0].timings.boot_s + records[0].timings.requests_s + 5


def test_the_engine_over_http_finds_it_too(cell: Cell) -> None:
    asked = plan("on", "0", compile_cache=str(cell.cache))
    record = run(asked, cell.folder / "b0").record
    assert (record.status, record.reason) == ("valid", "")
    assert cell.files() == {"kernel", "kernel.lock"}


def test_a_boot_that_compiles_more_is_void_and_the_next_finds_the_sealed_state(cell: Cell) -> None:
    late, then = cell.boot(0, "compile_late"), cell.boot(1, "compile_late")
    assert late.status == "void"
    assert late.reason.startswith("cache_state: compile cache of this cell: ")
    assert late.compile_cache is not None
    assert late.compile_cache.sealed == late.compile_cache.before != late.compile_cache.after
    assert (then.status, then.reason) == ("valid", "")
    assert cell.files() == {"kernel", "kernel.lock"}


def test_beside_other_boots_nothing_of_theirs_is_removed(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cell.boot(0).status == "valid"
    (cell.cache / "inductor" / "being-written").write_text("by a neighbour")
    monkeypatch.setenv(AT_ONCE, "2")
    record = cell.boot(1)
    assert (record.status, state_check(record)[0]) == ("void", False)
    assert "being-written" in cell.files()


def test_a_cache_that_was_changed_between_boots_makes_them_void(cell: Cell) -> None:
    assert cell.boot(0).status == "valid"
    (cell.cache / "inductor" / "more").mkdir()
    (cell.cache / "inductor" / "kernel").unlink()
    record = cell.boot(1)
    assert record.status == "void"
    assert record.compile_cache is not None
    assert record.compile_cache.before != record.compile_cache.sealed


def test_a_cache_that_never_settles_is_a_reason_and_not_a_boot(cell: Cell) -> None:
    record = cell.boot(0, "compile_anew")
    assert record.status == "failed"
    assert record.reason == (
        "launch: no compile cache for this cell: 4 engines in a row each left another state in "
        f"{cell.cache}; say compile_cache=off"
    )
    assert not record.requests


def test_an_engine_that_dies_while_it_warms_is_a_reason_and_nothing_is_sealed(cell: Cell) -> None:
    record = cell.boot(0, "die_in_boot")
    assert record.status == "failed"
    assert record.reason.startswith("boot: ")
    assert not list(cell.cache.parent.glob("*.json"))
    assert cell.boot(1).status == "valid"


def test_without_a_registered_cache_there_is_none_and_no_word_of_it(cell: Cell) -> None:
    asked = cell.plan(compile_cache=None)
    record = run(asked, cell.folder / "b0").record
    assert record.status == "valid"
    assert "compile_cache" not in canonical_json(asked)
    assert "compile_cache" not in canonical_json(record)
    assert not cell.cache.exists()


@given(st.dictionaries(st.text("abc", min_size=1), st.text("01"), max_size=5))
def test_a_state_says_every_file_and_no_lock(files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        empty = digest(state(Path(name)))
        for path, content in files.items():
            (Path(name) / path).write_text(content)
            (Path(name) / f"{path}.lock").touch()
        found = state(Path(name))
        assert set(found) == set(files)
        assert (digest(found) == empty) == (not files)
        for path, content in files.items():
            (Path(name) / path).write_text(content + "2")
            assert digest(state(Path(name))) != digest(found)
            (Path(name) / path).write_text(content)
