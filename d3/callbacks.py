"""The Hydra callback: registers the study and opens its parent run before the first job, closes it after the last.

Hydra turns exceptions of a callback into warnings, but a study must not start unregistered: errors leave by SystemExit.
"""

import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from d3.config import LARGE_STUDY
from d3.errors import D3Error, one_line
from d3.install import lock_digest, model_dir
from d3.launch import check_registered, on_this_machine, prepare
from d3.model import model_digest
from d3.plan import check_levels
from d3.preflight import preflight
from d3.price import Price
from d3.registration import Registration
from d3.store import study_dir
from d3.study import Pins, register

if TYPE_CHECKING:
    from d3.opened import OpenStudy

UNSEEN = "not known"  # the digest of weights that an endpoint serves which D3 did not start
DONE = ("valid", "skipped", "planned")  # what a job may return


class StudyCallback(Callback):
    """Runs in the process that was started, once per sweep (or once per single run)."""

    study: "OpenStudy | None" = None

    def __getstate__(self) -> dict[str, Any]:
        """Launchers send callbacks to their jobs; the study stays with the process that opened it."""
        return {}

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
        overrides = _swept(config)
        loader = GlobalHydra.instance().config_loader()
        if any(o.get_key_element() == "registration" for o in overrides):
            raise D3Error("registration= names the study of a single boot, a sweep registers its own",
                          "leave it out; the same command goes on with the same study")  # fmt: skip
        grid = [o for o in overrides if o.get_key_element() != "boot"]
        jobs = BasicSweeper.split_arguments(grid, None)[0]
        _ask_before(len(jobs) * config.boots, config.allow_large)
        configs = [loader.load_sweep_config(config, job) for job in jobs]
        at_once = prepare(config, len(jobs) * config.boots)
        if not config.plan_only:
            preflight(configs, at_once if on_this_machine(config.hydra) else 1)
        swept = [o.key_or_group for o in grid if o.is_sweep_override()]
        registration = register(configs, swept, pins(configs))
        if not config.plan_only:
            check_registered([c.at_once for c in configs], config.hydra, at_once)
        if config.dry_run:
            _dry_run(registration, config, at_once)
        study = self._open(registration, config)
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
            registration = register([config], [], pins([config]))
            if not config.plan_only:
                check_registered([config.at_once], config.hydra, 1)
            if config.dry_run:
                _dry_run(registration, config, 1)
            study = self._open(registration, config)
            config.registration = study.registration.id()

    def _open(self, registration: Registration, config: DictConfig) -> "OpenStudy":
        from d3.opened import OpenStudy  # not for --help: it imports MLflow

        check_levels(registration)
        self.study = OpenStudy(registration, price_of(config))
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
        except (HydraException, OmegaConfBaseException, OverflowError) as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            sys.exit(2)
        except Exception:  # a defect of ours: show it all, and run nothing unregistered
            traceback.print_exc()
            sys.exit(1)


def price_of(config: DictConfig) -> Price:
    """The price that a configuration names."""
    return Price.model_validate(OmegaConf.to_container(config.price))


def _dry_run(registration: Registration, config: DictConfig, at_once: int) -> NoReturn:
    from d3.dry_run import dry_run

    check_levels(registration)
    print(dry_run(registration, price_of(config), at_once))
    sys.exit(0)


def pins(configs: list[DictConfig]) -> Pins:
    """Digests of every lock and model that the configurations name."""
    engines = {c.engine.name: lock_digest(c.engine.lock) for c in configs}
    models: dict[str, str] = {}
    for config in configs:
        if config.model.name not in models:
            models[config.model.name] = UNSEEN if config.engine.transport == "attach" else _pinned(config.model)
    return Pins(engines, models)


def _pinned(model: DictConfig) -> str:
    found = model_digest(model_dir(model.name, model.package, model.path))
    if model.digest and model.digest != found:
        raise D3Error(f"model {model.name} has digest {found[:12]}, conf says {model.digest[:12]}",
                      "remove the model's folder and install again, or set model.digest to the new one")  # fmt: skip
    return found


def _swept(config: DictConfig) -> list[Override]:
    """What the sweeper will make the grid of: a study's own axes (hydra.sweeper.params), then the command line's."""
    own = [f"{key}={levels}" for key, levels in (config.hydra.sweeper.params or {}).items()]
    last = {o.get_key_element(): o for o in _parsed([*own, *config.hydra.overrides.task])}
    return list(last.values())


def _parsed(overrides: list[str]) -> list[Override]:
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(overrides)


def _ask_before(boots: int, allowed: bool) -> None:
    if boots > LARGE_STUDY and not allowed:
        raise D3Error(f"this study has {boots} boots, hours of work", "add allow_large=true if you mean it")
