"""The Hydra callback: registers the study and opens its parent run before the first job, closes it after the last.

Hydra turns exceptions of a callback into warnings, but a study must not start unregistered: errors leave by SystemExit.
"""

import sys
import traceback
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from d3.config import LARGE_STUDY
from d3.errors import D3Error, one_line
from d3.install import lock_digest, model_dir
from d3.model import model_digest
from d3.plan import check_levels
from d3.preflight import preflight
from d3.registration import Registration
from d3.store import study_dir
from d3.study import Pins, register

if TYPE_CHECKING:
    from d3.opened import OpenStudy

DONE = ("valid", "skipped", "planned")  # what a job may return


class StudyCallback(Callback):
    """Runs in the process that was started, once per sweep (or once per single run)."""

    study: "OpenStudy | None" = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Register the grid that the sweep spells out, log it, and hand its id to every job as an override."""
        self._guarded(self._start_sweep, config)

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """A single run is a study of one cell and one boot."""
        if config.registration is None:  # else one boot of a study that is registered already, and open elsewhere
            self._guarded(self._start_single, config)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Close the parent run and say how it went; exit code 1 where a boot has no valid answer."""
        self._guarded(self._finish, config)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """The same for a single run; Hydra raises a job's own error after this."""
        job_return: JobReturn = kwargs["job_return"]
        if job_return.status != JobStatus.COMPLETED:
            return
        if self.study is not None:
            self._guarded(self._finish, config)
        elif job_return.return_value not in DONE:
            sys.exit(1)

    def _start_sweep(self, config: DictConfig) -> None:
        overrides = _parsed(list(config.hydra.overrides.task))
        loader = GlobalHydra.instance().config_loader()
        if any(o.get_key_element() == "registration" for o in overrides):
            raise D3Error("registration= names the study of a single boot, a sweep registers its own",
                          "leave it out; the same command goes on with the same study")  # fmt: skip
        grid = [o for o in overrides if o.get_key_element() != "boot"]
        jobs = BasicSweeper.split_arguments(grid, None)[0]
        _ask_before(len(jobs) * config.boots, config.allow_large)
        configs = [loader.load_sweep_config(config, job) for job in jobs]
        if not config.plan_only:
            preflight(configs)
        swept = [o.key_or_group for o in grid if o.is_sweep_override()]
        study = self._open(register(configs, swept, pins(configs)))
        config.hydra.overrides.task.append(f"registration={study.registration.id()}")

    def _start_single(self, config: DictConfig) -> None:
        if config.boots < 1:
            raise D3Error(
                f"boots={config.boots}: there is nothing to boot", "leave boots out; a single run is one boot"
            )
        with open_dict(config):
            config.boots, config.boot = 1, 0
            if not config.plan_only:
                preflight([config])
            study = self._open(register([config], [], pins([config])))
            config.registration = study.registration.id()

    def _open(self, registration: Registration) -> "OpenStudy":
        from d3.opened import OpenStudy  # not for --help: it imports MLflow

        check_levels(registration)
        self.study = OpenStudy(registration)
        return self.study

    def _finish(self, config: DictConfig) -> None:
        if self.study is None:
            return
        if config.plan_only:
            self.study.close("SCHEDULED")
            boots = study_dir(self.study.registration.id()) / "boots"
            print(f"planned, nothing run: {boots}\nnext: python -m d3.host --help, or python -m d3.modal_app --help")
            return
        missing = self.study.finish()
        print(f"next: python -m d3.certify --run {self.study.run_id}")
        if missing:
            sys.exit(1)

    @staticmethod
    def _guarded(action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
        except D3Error as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.code)
        except (HydraException, OmegaConfBaseException) as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            sys.exit(2)
        except Exception:  # a defect of ours: show it all, and run nothing unregistered
            traceback.print_exc()
            sys.exit(1)


def pins(configs: list[DictConfig]) -> Pins:
    """Digests of every lock and model that the configurations name."""
    engines = {c.engine.name: lock_digest(c.engine.lock) for c in configs}
    models: dict[str, str] = {}
    for model in (c.model for c in configs):
        if model.name not in models:
            models[model.name] = _pinned(model)
    return Pins(engines, models)


def _pinned(model: DictConfig) -> str:
    found = model_digest(model_dir(model.name, model.package, model.path))
    if model.digest and model.digest != found:
        raise D3Error(f"model {model.name} has digest {found[:12]}, conf says {model.digest[:12]}",
                      "remove the model's folder and install again, or set model.digest to the new one")  # fmt: skip
    return found


def _parsed(overrides: list[str]) -> list[Override]:
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(overrides)


def _ask_before(boots: int, allowed: bool) -> None:
    if boots > LARGE_STUDY and not allowed:
        raise D3Error(f"this study has {boots} boots, hours of work", "add allow_large=true if you mean it")
