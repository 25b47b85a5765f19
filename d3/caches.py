"""A cell's compile and autotune cache, where the study registered one: warmed, sealed, and the same at every boot.

Each cell has a folder of its own beside the study's boots. Before the cell's first boot an engine with that boot's
plan fills it, and another, until one of them adds nothing; that state is sealed. No boot may leave it otherwise, so
every boot of the cell finds what the first one found. What such engines answer is kept nowhere.
"""

import shutil
from pathlib import Path

from d3.engine import Engine, EngineFailure
from d3.errors import D3Error
from d3.machine import boots_at_once
from d3.record import BootPlan, CacheState, Failure, Frozen, canonical_json, sha256
from d3.signals import deferred, shielded
from d3.starter import Starter
from d3.store import alone, load, write_atomic

ROUNDS = 4  # engines that may fill a cache; on an H200, with CUDA graphs, the third added nothing
LOCKS = ".lock"

Files = dict[str, str]  # SHA-256 by path below the folder


class Seal(Frozen):
    """A warmed cache: its files, and how many engines it took, of which the last added nothing."""

    files: Files
    rounds: int


def state(folder: Path) -> Files:
    """The files below a folder; not the lock files that Triton and Inductor leave, which are empty."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != LOCKS)
    return {p.relative_to(folder).as_posix(): sha256(p.read_bytes()) for p in found}


def digest(files: Files) -> str:
    """One SHA-256 for a state."""
    return sha256(canonical_json(files))


class CellCache:
    """The cache of a boot's cell. Make it before the boot, and ask it for what became of the cache afterwards."""

    def __init__(self, plan: BootPlan) -> None:
        """Warm and seal the cache where no boot of the cell did before. Raises EngineFailure."""
        assert plan.launch.compile_cache is not None  # noqa: S101
        self.folder = Path(plan.launch.compile_cache)
        self._seal = self._sealed(plan)
        if boots_at_once() == "1":  # else another boot may be writing there now
            self._tidy()
        self._before = digest(state(self.folder))

    def seen(self) -> CacheState:
        """Its state when this boot began and now."""
        after = state(self.folder)
        size = sum((self.folder / name).stat().st_size for name in after)
        return CacheState(sealed=digest(self._seal.files), before=self._before, after=digest(after),
                          files=len(after), mib=round(size / 2**20, 1), rounds=self._seal.rounds)  # fmt: skip

    def _sealed(self, plan: BootPlan) -> Seal:
        seal = self._beside("json")
        try:
            with alone(self._beside("lock")):
                if not seal.exists():
                    shutil.rmtree(self.folder, ignore_errors=True)
                    write_atomic(seal, canonical_json(_filled(plan, self.folder, self._beside("log"))) + "\n")
                return load(Seal, seal)
        except (D3Error, OSError) as error:
            line = f"no compile cache for this cell: {error}"
            raise EngineFailure(Failure(stage="launch", kind="environment", line=line)) from error

    def _tidy(self) -> None:
        """Remove what a boot before this one, which is void for it or was killed, added to the cache."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in self._seal.files:
                path.unlink()

    def _beside(self, suffix: str) -> Path:
        return self.folder.parent / f"{self.folder.name}.{suffix}"


def _filled(plan: BootPlan, folder: Path, log: Path) -> Seal:
    before: Files | None = None
    for number in range(1, ROUNDS + 1):
        _fill(plan, log)
        found = state(folder)
        if found == before:
            return Seal(files=found, rounds=number)
        before = found
    raise D3Error(f"{ROUNDS} engines in a row each left another state in {folder}", "say compile_cache=off")


def _fill(plan: BootPlan, log: Path) -> None:
    """Start this boot's engine plainly, ask it all that the boot asks, and forget the answers."""
    engine: Engine | None = None
    with Starter(shown=()) as starter:
        try:
            with deferred():
                engine, _ = starter.start(plan.model_copy(update={"start": None}), log)
            engine.start()
            for request in (*([plan.warmup] if plan.warmup else ()), *plan.requests):
                engine.ask(request)
        finally:
            with shielded():
                if engine is not None:
                    engine.stop()
