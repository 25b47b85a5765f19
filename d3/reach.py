"""Where MLflow is, and one line where it does not answer."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mlflow.exceptions import MlflowException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from d3.errors import D3Error
from d3.store import runs_dir

KEPT = 100


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
    """Turn what MLflow and its libraries raise into a D3Error that says what to do."""
    try:
        yield
    except (MlflowException, OSError, sqlite3.Error, SQLAlchemyError) as error:
        remedy = "start it or set MLFLOW_TRACKING_URI; recorded boots are kept, send them: python -m d3.sync"
        raise D3Error(f"MLflow at {tracking_uri()} does not answer: {reason(error)}", remedy) from error


def prepare() -> None:
    """Make a dead store fail within seconds, and quietly: by MLflow's defaults it blocks a command for minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # MLflow reads these at every call
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # the error itself says so
    runs_dir().mkdir(parents=True, exist_ok=True)
    # Open an SQLite store once ourselves: where it cannot be opened, MLflow would try again for 100 seconds.
    if tracking_uri().startswith("sqlite:") and (path := make_url(tracking_uri()).database):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("select count(*) from sqlite_master")
