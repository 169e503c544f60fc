"""Optuna's storages by URL: SQLite, PostgreSQL or MySQL, a journal file, a gRPC proxy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import SQLAlchemyError

from flashladder.common.errors import ResultsError, first_line

HEARTBEAT_SECONDS = 15
GRACE_SECONDS = 90  # without a heartbeat, and the process that measured a trial is taken for dead
CONNECT_SECONDS = 10


def default_url(results: Path) -> str:
    """The storage of a machine that tunes alone: one file for all its studies."""
    return f"sqlite:///{results / 'tuning' / 'studies.db'}"


def open_storage(url: str) -> BaseStorage:
    """The storage behind a URL; SQLite and journal files are made where there are none. Raises as `named` says."""
    scheme, _, rest = url.partition("://")
    with named(url), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if scheme == "grpc":
            host, _, port = rest.partition(":")
            return GrpcStorageProxy(host=host, port=int(port))
        if scheme == "journal":
            return JournalStorage(JournalFileBackend(_with_folder(rest)))
        if scheme == "sqlite":
            _with_folder(rest.removeprefix("/"))
        return optuna.storages.get_storage(
            RDBStorage(
                re.sub("^postgresql://", "postgresql+psycopg://", url),
                engine_kwargs={"pool_pre_ping": True, "connect_args": _connection(scheme)},
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
            )
        )


def open_existing(url: str) -> BaseStorage:
    """The same of a storage to be read: none is made. ResultsError where there is none."""
    scheme, _, rest = url.partition("://")
    if (
        scheme in ("sqlite", "journal")
        and not (path := Path(rest.removeprefix("/" if scheme == "sqlite" else ""))).exists()
    ):
        raise ResultsError(f"no search has made {path} yet: `flashladder search 16 --gpu here` does, on a GPU")
    return open_storage(url)


@contextmanager
def named(url: str) -> Iterator[None]:
    """Turns what goes wrong with a storage into a ResultsError that names it, without its password."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, ImportError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        raise ResultsError(
            f"the storage {without_password(url)} cannot be used: {first_line(cause)}. A file works on one machine, "
            "sqlite:////home/me/studies.db; a server for several, postgresql://user:password@host/database"
        ) from error


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", url)


def _connection(scheme: str) -> dict[str, Any]:
    return {"timeout": 60} if scheme == "sqlite" else {"connect_timeout": CONNECT_SECONDS}


def _with_folder(path: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path
