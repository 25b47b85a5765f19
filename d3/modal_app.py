"""`python -m d3.modal_app STUDY`: run a planned study's boots on Modal, each in a container with a GPU of its own.

`python -m d3 -m engine=vllm ... plan_only=true` registers and plans. Results are stored here as they come, so
nothing in the cloud needs to reach a tracking server; then `python -m d3.sync && python -m d3.certify`.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from pydantic import Field, ValidationError

from d3.attempts import Attempts
from d3.errors import D3Error, command
from d3.install import lock_file, model_dir
from d3.job import OPEN
from d3.modal_boot import WEIGHTS, Returned, boot
from d3.model import model_digest
from d3.record import BootPlan, Frozen
from d3.registration import Registration
from d3.signals import STOPPED, stop_on_signals
from d3.store import (
    LOG,
    RECORD,
    boot_dir,
    explain,
    find_registration,
    lock_study,
    root,
    save_boot,
    save_plan,
    write_atomic,
)

if TYPE_CHECKING:
    import modal

PYTHON_VERSION = "3.12"  # that of locks/vllm.txt
LOGIN = "run: modal setup (in a browser), or: modal token set --token-id ID --token-secret SECRET"


class Settings(Frozen):
    """Where boots run; the keys of conf/modal.yaml, which explains them."""

    gpu: str
    at_once: int = Field(ge=1)
    timeout_s: int = Field(ge=1)
    region: str | None
    volume: str


def define(
    settings: Settings, lock: Path
) -> "tuple[modal.App, modal.Function[[BootPlan], Returned, Returned], modal.Volume]":
    """The app, its one function and the volume of weights; nothing is sent to Modal yet.

    A container serves one boot and ends, so every boot is cold to the container. No retries: Modal starts a boot anew
    only where it lost the container, and D3 only as often as registered.
    """
    import modal

    app = modal.App("d3", include_source=False)
    image = (
        modal.Image.debian_slim(python_version=PYTHON_VERSION)
        .uv_pip_install(requirements=[str(lock)])
        .add_local_python_source("d3")
    )
    volume = modal.Volume.from_name(settings.volume, create_if_missing=True)
    function = app.function(
        image=image,
        gpu=settings.gpu,
        region=settings.region,
        timeout=settings.timeout_s,
        max_containers=settings.at_once,
        volumes={WEIGHTS: volume.with_mount_options(read_only=True)},
        single_use_containers=True,
        retries=0,
    )(boot)
    return app, function, volume


def engine_lock(registration: Registration) -> Path:
    """The lock of the image. Raises D3Error where it does not pin the one engine that the study registered."""
    engines = [cell.settings["engine"] for cell in registration.cells]
    pins = sorted({f"{engine['distribution']}=={engine['version']}" for engine in engines})
    if len(pins) > 1:
        raise D3Error(f"the study has {len(pins)} engines ({', '.join(pins)}), the image has one", "one study for each")
    name = pins[0].partition("==")[0]
    lock = lock_file(name)
    if not lock.exists() or pins[0] not in lock.read_text().splitlines():
        raise D3Error(f"{lock} does not pin {pins[0]}", f"write {pins[0]} into locks/{name}.in and run: make locks")
    return lock


def upload(volume: "modal.Volume", registration: Registration, model: str | None) -> None:
    """Put the registered weights on the volume, in a folder of their digest, where they are not there yet."""
    import modal

    for weights in {c.settings["model"]["digest"]: c.settings["model"] for c in registration.cells}.values():
        digest = weights["digest"]
        try:
            if volume.listdir(f"/{digest}"):
                continue
        except modal.exception.NotFoundError:
            pass
        folder = Path(model_dir(weights["name"], weights["package"], model))
        if model_digest(str(folder)) != digest:
            raise D3Error(f"{folder} does not hold the weights registered, {digest[:12]}", "name them: --model PATH")
        print(f"uploading {folder}", flush=True)
        with volume.batch_upload() as batch:
            put = batch.put_file if folder.is_file() else batch.put_directory
            put(str(folder), f"/{digest}/{folder.name}")


def collect(results: Iterable[Any]) -> list[str]:
    """Store each result as it comes, a boot once; returns what came instead of results, a line for each."""
    import modal

    lines = []
    try:
        for result in results:
            if isinstance(result, Returned):
                _keep(result)
            else:
                lines.append(_said(result))
    except (modal.Error, OSError) as error:
        lines.append(f"the connection ended: {_said(error)}")
    return lines


def _said(error: BaseException) -> str:
    """The kind of an error, and its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:300]}"


def _keep(result: Returned) -> None:
    record = result.boot.record
    folder = boot_dir(record)
    again = (folder / RECORD).exists()
    if not again:  # a boot whose container Modal took for lost can come twice: the first one counts
        write_atomic(folder / LOG, result.log)
        save_boot(result.boot, folder)
    said = "came again, the first stays" if again else f"{record.status} {record.reason}".strip()
    print(f"{record.position:3d} {record.stratum} {record.cell} boot {record.boot}: {said[:300]}", flush=True)


@contextmanager
def reached() -> Iterator[None]:
    """Turn what Modal raises before the first result into one line with its remedy."""
    import modal

    try:
        yield
    except modal.exception.AuthError as error:
        raise D3Error("Modal has no valid credentials here", LOGIN) from error
    except modal.Error as error:
        raise D3Error(f"Modal: {_said(error)}", "the same command goes on where this one stopped") from error


def run(study: str, settings: Settings, model: str | None) -> int:
    """Run every boot that is due; returns how many are left without a valid record."""
    import modal

    registration = find_registration(study)
    lock = engine_lock(registration)
    with lock_study(registration.id()):
        if plans := Attempts(registration).plans(OPEN):
            if together := sorted({plan.at_once for plan in plans} - {None, 1}, key=str):
                raise D3Error(f"at_once={together[0]} is registered, and on Modal each boot has a GPU of its own",
                              "run these plans with python -m d3.host")  # fmt: skip
            if any(plan.launch.compile_cache for plan in plans):
                raise D3Error("compile_cache=warmed is registered, and on Modal no boot finds what another compiled",
                              "run these plans with python -m d3.host")  # fmt: skip
            app, function, volume = define(settings, lock)
            for plan in plans:
                save_plan(plan)
            print(f"{len(plans)} boots on Modal, {settings.gpu}, {settings.at_once} at once", flush=True)
            with reached():
                upload(volume, registration, model)
                with modal.enable_output(), app.run():
                    lines = collect(function.map(plans, order_outputs=False, return_exceptions=True))
            for line in dict.fromkeys(lines):
                print(f"no result: {line}", file=sys.stderr)
            lost = [plan.boot_id.partition("/")[2] for plan in plans if not (boot_dir(plan) / RECORD).exists()]
            for name in lost:
                print(f"no record: {name}", file=sys.stderr)
        counts = Attempts(registration).tally()
    print(f"{counts.words()}\nnext: python -m d3.sync && python -m d3.certify")
    return counts.missing


@command
def main(argv: list[str] | None = None) -> int:
    """0 when every boot has a valid record, 1 when one has not, 2 where it could not begin."""
    defaults: Any = OmegaConf.to_container(OmegaConf.load(root() / "conf" / "modal.yaml"))
    parser = argparse.ArgumentParser(prog="python -m d3.modal_app", description="Run a planned study on Modal.")
    parser.add_argument("study", type=Path, help="the folder that planning named, runs/studies/ID/boots, or the ID")
    parser.add_argument("--model", help="the registered model's folder here (default: the one D3 converted)")
    for key, value in defaults.items():
        kind = int if isinstance(value, int) else str
        parser.add_argument(
            f"--{key.replace('_', '-')}", type=kind, default=value, help=f"see conf/modal.yaml (default {value})"
        )
    options = vars(parser.parse_args(argv))
    study, model = options.pop("study"), options.pop("model")
    try:
        import modal  # noqa: F401

        stop_on_signals()
        return min(1, run(study.parent.name if study.name == "boots" else study.name, Settings(**options), model))
    except ImportError:
        print("error: the package modal is not installed; run: pip install 'd3[modal]'", file=sys.stderr)
        return 2
    except ValidationError as error:
        print(f"error: {explain(error)}; see conf/modal.yaml", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
