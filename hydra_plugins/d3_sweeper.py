"""Hydra's basic sweeper with the registered order: randomised blocks of boots, whatever launcher runs them.

Hydra finds plugins only in a top-level folder of this name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override

from d3 import launch
from d3.registration import Registration
from d3.store import find_registration


@dataclass
class StudySweeperConf:
    """The sweeper's configuration, as `hydra/sweeper: d3`."""

    _target_: str = "hydra_plugins.d3_sweeper.StudySweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="d3", node=StudySweeperConf, provider="d3")


class StudySweeper(BasicSweeper):
    """The product of the axes, sorted into the order that was drawn at registration."""

    def sweep(self, arguments: list[str]) -> Any:
        """Run all jobs; those of a launcher with processes of its own end together."""
        assert self.config is not None and self.launcher is not None  # noqa: S101 - Hydra calls setup first
        if not launch.side_by_side(self.config.hydra):
            return super().sweep(arguments)
        (study,) = (word.partition("=")[2] for word in arguments if word.startswith("registration="))
        quiet = ".hydra_joblib_launcher." in self.config.hydra.launcher._target_  # its jobs print where this one does
        here = launch.on_this_machine(self.config.hydra)
        with launch.Together(self.launcher, study, quiet, here) as self.launcher:
            return super().sweep(arguments)

    @staticmethod
    def split_arguments(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        """The jobs' overrides in one or more batches; without a registration (a plain Hydra call) in product order."""
        jobs = BasicSweeper.split_arguments(overrides, None)[0]
        asked = [o.get_value_element_as_str() for o in overrides if o.get_key_element() == "registration"]
        ordered = in_order(jobs, find_registration(asked[-1])) if asked else jobs
        return list(BasicSweeper.split_overrides_to_chunks(ordered, max_batch_size))

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing more to do: registering the study composed and checked every cell (a fifth of a second each)."""


def in_order(jobs: list[list[str]], registration: Registration) -> list[list[str]]:
    """Sort jobs by their slot in the registered order; the registration's cells are in the product's own order."""
    grids = [tuple(word for word in job if not word.startswith("boot=")) for job in jobs]
    cells = dict(zip(dict.fromkeys(grids), registration.cells, strict=True))
    place = {(s.boot, s.stratum, s.cell): i for i, s in enumerate(registration.order)}

    def slot(pair: tuple[list[str], tuple[str, ...]]) -> int:
        boot = next(int(word.partition("=")[2]) for word in pair[0] if word.startswith("boot="))
        cell = cells[pair[1]]
        return place.get((boot, cell.stratum, cell.cell), len(place) + boot)

    return [job for job, _ in sorted(zip(jobs, grids, strict=True), key=slot)]
