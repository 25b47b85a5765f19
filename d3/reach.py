"""Where MLflow is, and one line where it does not answer."""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from mlflow.exceptions import MlflowException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_all,
    wait_exponential_jitter,
)

from d3.errors import Unreachable
from d3.redact import without_password
from d3.store import alone, runs_dir

KEPT = 100
FIRST_S, LONGEST_S = 0.2, 5.0  # how long to wait before the second try, and at most before any
TRIES = 3

T = TypeVar("T")


def tracking_uri() -> str:
    """$MLFLOW_TRACKING_URI, else an SQLite file under `runs/`, always absolute."""
    path = str(runs_dir() / "mlflow.db").replace("%", "%25").replace("?", "%3F")  # it is read as a URL
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{path}"


def reason(error: BaseException) -> str:
    """The first line of an error, or of what caused it: HTTP libraries wrap `Connection refused` four times."""
    seen = error
    while cause := seen.__cause__ or seen.__context__ or getattr(seen, "reason", None):
        if not isinstance(cause, BaseException):
            break
        seen = cause
    words = seen.strerror if isinstance(seen, OSError) and seen.strerror else str(seen)
    return ((words or str(error)).strip() or type(error).__name__).splitlines()[0][:KEPT]


@contextmanager
def reachable() -> Iterator[None]:
    """Turn what MLflow and its libraries raise into an Unreachable that says what to do."""
    try:
        yield
    except (MlflowException, OSError, sqlite3.Error, SQLAlchemyError) as error:
        kept = "recorded boots are kept, send them: python -m d3.sync"
        remedy = f"start it or set MLFLOW_TRACKING_URI; {kept}"
        if "database schema" in str(error):
            remedy = f"it is of another MLflow version: copy it, then mlflow db upgrade; or name another store; {kept}"
        said = without_password(f"MLflow at {tracking_uri()} does not answer: {reason(error)}")
        raise Unreachable(said, remedy) from error


def patiently(action: Callable[[], T], seconds: float) -> T:
    """Do this, which changes nothing by being done twice, again while MLflow does not answer, for so many seconds.

    Several writers at once are such a case too: a locked database, or a row that the other one was quicker to insert.
    On a busy machine one try may take all the seconds, so there are three at least; with none given, there is one.
    """
    wait = wait_exponential_jitter(multiplier=FIRST_S, max=LONGEST_S)
    stop = stop_all(stop_after_delay(seconds), stop_after_attempt(TRIES if seconds else 1))
    return Retrying(stop=stop, wait=wait, retry=retry_if_exception_type(Unreachable), reraise=True)(action)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """An SQLite store is made and upgraded by whoever opens it first: several processes at once would fail at it."""
    if not tracking_uri().startswith("sqlite:"):
        yield
        return
    runs_dir().mkdir(parents=True, exist_ok=True)
    with alone(runs_dir() / "opening"):
        yield


def prepare() -> None:
    """Make a dead store fail within seconds, and quietly: by MLflow's defaults it blocks a command for minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # MLflow reads these at every call
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # the error itself says so
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # a full disk is a traceback there
    runs_dir().mkdir(parents=True, exist_ok=True)
    # Open an SQLite store once ourselves: where it cannot be opened, MLflow would try again for 100 seconds.
    if tracking_uri().startswith("sqlite:") and (path := make_url(tracking_uri()).database):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("select count(*) from sqlite_master")
