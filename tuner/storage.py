"""Optuna: its storages by URL, SQLite, PostgreSQL or MySQL, a journal file, a gRPC proxy; and what it calls fields."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError

from flashladder.common.errors import ResultsError, first_line
from flashladder.common.problem.config import Value

HEARTBEAT_SECONDS = 15
GRACE_SECONDS = 90  # without a heartbeat, and the process that measured a trial is taken for dead
CONNECT_SECONDS = 10
HIDDEN = "***"
FILES = ("sqlite", "journal")  # schemes of storages that are files
_SECRET = re.compile("pass(?!file)|pwd|secret|token", re.IGNORECASE)  # in a query


def default_url(results: Path) -> str:
    """The storage of a machine that tunes alone: one file for all its studies."""
    return f"sqlite:///{results / 'tuning' / 'studies.db'}"


def open_storage(url: str) -> BaseStorage:
    """The storage behind a URL; SQLite and journal files are made where there are none. Raises as `named` says."""
    scheme, _, rest = url.partition("://")
    with named(url), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if scheme == "journal":
            return JournalStorage(JournalFileBackend(_with_folder(rest)))
        if not (parts := _parts(url)):
            raise ValueError(
                "it is no URL that can be read in one way only; in user, password and database %40 stands for @, %2F "
                "for / and %3F for ?"
            )
        if scheme == "grpc":
            if parts.username or not parts.port:
                raise ValueError("grpc://host:port has a port, and neither user nor password")
            return GrpcStorageProxy(host=parts.host or "", port=parts.port)
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
        tells = _tells(error, url)
        words = f"{type(cause).__name__}, whose message might show the password" if tells else first_line(cause)
        raise ResultsError(
            f"the storage {without_password(url)} cannot be used: {words}. A file works on one machine, "
            "sqlite:////home/me/studies.db; a server for several, postgresql://user:password@host/database"
        ) from (None if tells else error)


def distributions(fields: Mapping[str, Sequence[Value]]) -> dict[str, BaseDistribution]:
    """The fields as Optuna sees them."""
    return {name: CategoricalDistribution(tuple(values)) for name, values in fields.items()}


def quietly(make: Callable[[], optuna.Study]) -> optuna.Study:
    """Calls Optuna without its chatter."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return make()


def without_password(url: str) -> str:
    """The URL as it may be shown; of one that cannot be read no more than its scheme."""
    if url.partition(":///")[0] in FILES or re.fullmatch(r"[\w./-]*", url):
        return url
    if not (parts := _parts(url)):
        scheme = re.match(r"[\w+]*:?//", url)
        return f"{scheme[0] if scheme else ''}{HIDDEN}"
    query = {name: HIDDEN if _is_secret(name, value) else value for name, value in parts.query.items()}
    return parts.set(query=query).render_as_string().replace(quote(HIDDEN, safe=""), HIDDEN)


def _parts(url: str) -> URL | None:
    """What a URL consists of; None where it is none, or where a part of the password may pass for another."""
    try:
        parts = make_url(url)
    except (SQLAlchemyError, ValueError):
        return None
    return None if url.count("@") > 1 or re.search(r"\?.*=.*@", url) else parts


def _tells(error: BaseException | None, url: str) -> bool:
    """Whether an error, or one that it comes from, has the URL or a password of it in its message."""
    secrets = {url}
    if parts := _parts(url):
        queried = parts.normalized_query.items()
        secrets.update(each for name, values in queried for each in values if _is_secret(name, each))
        secrets.add(str(parts.password or url))
    while error:
        if any(secret in words for secret in secrets for words in (str(error), unquote(str(error)))):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_secret(name: str, value: str | tuple[str, ...]) -> bool:
    return bool(_SECRET.search(f"{name} {value}"))


def _connection(scheme: str) -> dict[str, Any]:
    return {"timeout": 60} if scheme == "sqlite" else {"connect_timeout": CONNECT_SECONDS}


def _with_folder(path: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path
