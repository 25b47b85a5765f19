"""Files under `runs/`: one place owns all names; every write is a temporary file renamed into place."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TypeVar

from pydantic import ValidationError

from d3.errors import D3Error
from d3.record import Boot, BootPlan, BootRecord, Frozen, Place, Response, canonical_json
from d3.registration import Registration, short

PLAN = "plan.json"
RECORD, RESPONSES, LOG, HASHES = "boot.json", "responses.jsonl", "engine.log", "hashes.txt"
REGISTRATION, REGISTERED_AT = "registration.json", "registered_at"
CACHES_DIR = "caches"
PARENT, SENT, DOWN = "parent.json", "sent", "down"  # d3.spool: the study's run in MLflow, what was sent, an outage

M = TypeVar("M", bound=Frozen)


def root() -> Path:
    """The project folder: the one that holds `d3/` and `conf/`."""
    return Path(__file__).resolve().parent.parent


def runs_dir() -> Path:
    """Where boots are recorded: $D3_RUNS, else `runs/` in the project folder."""
    return Path(os.environ.get("D3_RUNS") or root() / "runs").absolute()


def cache_dir() -> Path:
    """Engines and converted models: $D3_CACHE, else `d3` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "d3"
    return Path(os.environ.get("D3_CACHE") or default).absolute()


def study_dir(registration_id: str) -> Path:
    """The folder of one registration."""
    return runs_dir() / "studies" / short(registration_id)


def lock_study(registration_id: str) -> IO[str]:
    """Take a study for this process; the lock goes with the returned file. Raises D3Error when another one has it."""
    folder = study_dir(registration_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise D3Error(f"cannot write in {folder}: {error.strerror}", "set D3_RUNS to another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise D3Error(f"study {short(registration_id)} is being run by another process",
                      "wait for it, or stop it first") from error  # fmt: skip
    return file


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock file while inside, waiting for whoever has it; it is let go when its holder ends, however that is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise D3Error(f"cannot write {path}: {error.strerror}", "set D3_RUNS to another folder") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def slug(name: str) -> str:
    """A cell or stratum name as a file name."""
    return "".join(c if c.isalnum() or c in ".-" else "-" if c == "=" else "_" for c in name)


def boots_dir(registration_id: str) -> Path:
    """The folder of a study's boots."""
    return study_dir(registration_id) / "boots"


def caches_dir(registration_id: str) -> Path:
    """The folder of a study's warmed compile caches, one per cell."""
    return study_dir(registration_id) / CACHES_DIR


def boot_dir(place: Place) -> Path:
    """The folder of one boot's files."""
    name = boot_slug(place.stratum, place.cell, place.boot, place.attempt)
    return boots_dir(place.registration) / name


def boot_slug(stratum: str, cell: str, boot: int, attempt: int) -> str:
    """The folder name of one attempt at one boot."""
    return f"{slug(stratum)}__{slug(cell)}__b{boot:02d}-a{attempt}"


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that it is there whole or not at all. Raises D3Error where the disk refuses."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise D3Error(f"cannot write {path}: {error.strerror}", "free disk space or choose another folder") from error


def append(path: Path, line: str) -> None:
    """Add one line to a file. Raises D3Error where the disk refuses."""
    try:
        with path.open("a") as file:
            file.write(line)
    except OSError as error:
        raise D3Error(f"cannot write {path}: {error.strerror}", "free disk space or choose another folder") from error


def unfinished(folder: Path) -> list[Path]:
    """The temporary files of a boot's writes that were cut short by a kill."""
    return [path for name in (PLAN, RECORD, RESPONSES, HASHES, LOG) for path in folder.glob(f".{name}.*")]


def read_file(path: Path, missing: str = "check the path") -> bytes:
    """A file's bytes. Raises D3Error where it cannot be read; `missing`: what to do where it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise D3Error(f"{path} does not exist", missing) from error
    except OSError as error:
        raise D3Error(f"cannot read {path}: {error.strerror}", "check the path") from error


def load(model: type[M], path: Path) -> M:
    """Read one model from a JSON file. Raises D3Error that names the file and the field."""
    return parsed(model, read_file(path), str(path))


def parsed(model: type[M], raw: bytes, name: str) -> M:
    """One model from JSON. Raises D3Error that gives the name and the field."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise D3Error(f"{name}: {explain(error)}", "the file is damaged or of another version") from error


def explain(error: ValidationError) -> str:
    """The first schema problem as `field: what is wrong`."""
    first = error.errors()[0]
    return f"{'.'.join(str(x) for x in first['loc']) or 'file'}: {first['msg']}"


def responses_text(boot: Boot) -> str:
    """The distinct responses as canonical JSON lines, sorted by key."""
    return "".join(canonical_json(boot.responses[key]) + "\n" for key in sorted(boot.responses))


def parse_responses(text: str, name: str) -> dict[str, Response]:
    """Responses by key from JSON lines. Raises D3Error that names the line and the field."""
    found: dict[str, Response] = {}
    # Not splitlines(): completions may hold U+2028 and the like. Not model_validate_json(): it refuses lone surrogates.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        try:
            response = Response.model_validate(json.loads(line))
        except ValidationError as error:
            raise D3Error(f"{name} line {number}: {explain(error)}", "the file is damaged") from error
        except (ValueError, RecursionError) as error:
            raise D3Error(f"{name} line {number}: not JSON ({error})", "the file is damaged") from error
        found[response.key()] = response
    return found


def save_plan(plan: BootPlan) -> None:
    """Write a boot's plan where its record will be."""
    write_atomic(boot_dir(plan) / PLAN, canonical_json(plan) + "\n")


def save_boot(boot: Boot, folder: Path) -> None:
    """Write a boot's files; the record last, so that a record on disk is always complete."""
    write_atomic(folder / RESPONSES, responses_text(boot))
    write_atomic(folder / HASHES, hashes_text(boot.record))
    write_atomic(folder / RECORD, canonical_json(boot.record) + "\n")


def hashes_text(record: BootRecord) -> str:
    """One line per request for people: phase, prompt, cached tokens and the start of each hash."""
    return "".join(
        f"{r.index:3d} {r.phase:3s} {r.prompt:12s} cached {r.cached_tokens!s:>4s}/{r.prompt_tokens}"
        f"  text {r.text_sha256[:12]}  tokens {r.tokens_sha256[:12]}  logprobs {r.logprobs_sha256[:12]}\n"
        for r in record.requests
    )


def load_boot(folder: Path) -> Boot:
    """Read one boot's record and responses."""
    record = load(BootRecord, folder / RECORD)
    path = folder / RESPONSES
    try:
        text = path.read_text("utf-8", "surrogatepass")
    except (OSError, UnicodeDecodeError) as error:
        raise D3Error(f"cannot read {path}: {error}", "the file is missing or damaged") from error
    return Boot(record=record, responses=parse_responses(text, str(path)))


def recorded(registration_id: str) -> Iterator[tuple[Path, BootRecord]]:
    """Every record of a study on disk, in the order of their names."""
    for path in sorted(boots_dir(registration_id).glob(f"*/{RECORD}")):
        yield path.parent, load(BootRecord, path)


def save_registration(registration: Registration) -> str:
    """Write the registration once, and the time beside it; returns that time (ISO 8601), whenever it was.

    The time tells registerings of the same study on several machines apart, so it has microseconds.
    """
    folder = study_dir(registration.id())
    if not (folder / REGISTERED_AT).exists():
        write_atomic(folder / REGISTRATION, canonical_json(registration) + "\n")
        write_atomic(folder / REGISTERED_AT, datetime.now(UTC).isoformat(timespec="microseconds") + "\n")
    return (folder / REGISTERED_AT).read_text().strip()


def find_registration(registration_id: str) -> Registration:
    """Read a registration by its id, or its first 12 digits, and check that its content still has that id."""
    found = load(Registration, study_dir(registration_id) / REGISTRATION)
    if not found.id().startswith(registration_id):
        raise D3Error(f"the registration on disk has id {short(found.id())}, not {short(registration_id)}",
                      "remove its folder under runs/studies and start the study again")  # fmt: skip
    return found


def read_json(path: Path) -> object:
    """Any JSON file, safely."""
    return json.loads(path.read_text("utf-8"))
