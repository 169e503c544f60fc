"""A study in its storage: what was measured, what is being measured and by whom. Nothing finished is ever lost.

A trial is claimed, measured and finished. Claiming writes a running trial in one transaction, and then looks whether
another of a lower number has the same code: trials are numbered one after the other, so of two searches that claim the
same kernel exactly one goes on. Finishing writes the outcome, then the state; whoever comes across a trial that has
the one and not the other completes it. A claim whose search died is given up: by its process where that was on this
machine, by its heartbeat elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from flashladder.common.errors import ConfigError, ResultsError
from flashladder.common.problem.config import Value
from flashladder.tuner.storage import (
    HEARTBEAT_SECONDS,
    distributions,
    named,
    open_storage,
    quietly,
    without_password,
)

LONGEST_TRIAL = 3600.0  # seconds; a claim that is older was given up, whatever its storage knows of heartbeats

MEASURED, ABANDONED, DUPLICATE = "measured", "abandoned", "duplicate"  # verdicts, beside those of a quarantine
_IDENTITY, _FINAL = "identity", "final"  # attributes of the study
_OUTCOME, _OWNER, _CODE, _CLAIMED = "outcome", "owner", "code", "claimed"  # and of a trial


class Ledger:
    """One study, shared by any number of searches.

    Raises ConfigError where the study was made for something else, ResultsError where its storage cannot be used.
    """

    def __init__(
        self,
        storage: str,
        study: str,
        identity: Mapping[str, Any],
        fields: Mapping[str, Sequence[Value]],
        folder: Path | None = None,
    ) -> None:
        self.name = study
        self.folder = folder  # of results, which its log is in; by default this repository's
        self.url = storage
        self._distributions = distributions(fields)
        self._mine: set[int] = set()  # ids of trials that this process measures
        self._storage = open_storage(storage)
        with named(storage):
            self.study = quietly(
                lambda: optuna.create_study(
                    study_name=study, storage=self._storage, direction="maximize", load_if_exists=True
                )
            )
            self._id = self._storage.get_study_id_from_name(study)
            self._agree_on(dict(identity))
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def trials(self) -> list[FrozenTrial]:
        """All trials by number, those that came to nothing among them."""
        with named(self.url):
            return self._storage.get_all_trials(self._id, deepcopy=False)

    def valid(self) -> list[FrozenTrial]:
        """The trials that were measured, are in quarantine or under way."""
        return [trial for trial in self.trials() if verdict_of(trial) not in (ABANDONED, DUPLICATE)]

    def taken(self) -> set[str]:
        """The codes that nobody needs to measure any more."""
        return {code_of(trial) for trial in self.valid()}

    def claim(self, code: str, params: Mapping[str, Value], facts: Mapping[str, Any]) -> int | None:
        """The id of a trial of this code, to be measured now; None where another search has it."""
        template = optuna.create_trial(
            state=TrialState.RUNNING,
            params=dict(params),
            distributions=self._distributions,
            user_attrs={_CODE: code, _OWNER: me(), _CLAIMED: time.time(), **facts},
        )
        with named(self.url):
            trial = self._storage.create_new_trial(self._id, template)
            self._record_heartbeat(trial)
            number = self._storage.get_trial_number_from_id(trial)
        self._mine.add(trial)
        if any(other.number < number and code_of(other) == code for other in self.valid()):
            self.finish(trial, {"verdict": DUPLICATE, "reason": "another search has it"})
            return None
        return trial

    def finish(self, trial: int, outcome: Mapping[str, Any], ratio: float | None = None) -> None:
        """Record what came of a claimed trial: `outcome` has a verdict, and all but measured ones have no ratio."""
        with named(self.url), suppress(UpdateFinishedTrialError):  # taken for dead, or completed, by another search
            self._storage.set_trial_user_attr(trial, _OUTCOME, {**outcome, "ratio": ratio})
            self._complete(trial, ratio)
        self._mine.discard(trial)

    def rescue(self) -> None:
        """Complete or give up the trials of searches that died."""
        for trial in self.trials():
            if trial.state != TrialState.RUNNING:
                continue
            with named(self.url):
                id_ = self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)
            if id_ in self._mine:
                continue
            owner, age = trial.user_attrs.get(_OWNER), time.time() - trial.user_attrs.get(_CLAIMED, 0)
            if outcome := outcome_of(trial):
                with named(self.url), suppress(UpdateFinishedTrialError):
                    self._complete(id_, outcome["ratio"])
            elif owner is None or is_gone(owner) or age > LONGEST_TRIAL:
                self.finish(id_, {"verdict": ABANDONED, "reason": "its search died"})
        with named(self.url), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)

    @property
    def final(self) -> dict[str, Any] | None:
        """What the finalists' contest gave, as `conclude` was told."""
        with named(self.url):
            return self._storage.get_study_user_attrs(self._id).get(_FINAL)

    def conclude(self, final: Mapping[str, Any]) -> None:
        """Record the winner and the finalists."""
        with named(self.url):
            self._storage.set_study_user_attr(self._id, _FINAL, dict(final))

    def close(self) -> None:
        """Leaves the storage in peace."""
        self._closed.set()
        self._storage.remove_session()

    def _complete(self, trial: int, ratio: float | None) -> None:
        if ratio is None:
            self._storage.set_trial_state_values(trial, TrialState.FAIL)
        else:
            self._storage.set_trial_state_values(trial, TrialState.COMPLETE, [ratio])

    def _agree_on(self, identity: dict[str, Any]) -> None:
        """The study is what this search takes it for, or has no trials yet."""
        if not self._storage.get_n_trials(self._id):
            self._storage.set_study_user_attr(self._id, _IDENTITY, identity)
            return
        there = self._storage.get_study_user_attrs(self._id).get(_IDENTITY)
        if there is None:
            raise ConfigError(
                f"the study {self.name} in {without_password(self.url)} was not made by this tuner; "
                "give another name with --study"
            )
        differences = [
            f"{name} {there.get(name)}, not {value}" for name, value in identity.items() if there.get(name) != value
        ]
        if differences:
            raise ConfigError(
                f"the study {self.name} in {without_password(self.url)} was made for {'; '.join(differences)}. It is "
                "left as it is; start another with --study NAME"
            )

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            for trial in list(self._mine):
                with suppress(ResultsError), named(self.url):  # the search itself finds out, and says so
                    self._record_heartbeat(trial)

    def _record_heartbeat(self, trial: int) -> None:
        record = getattr(self._storage, "record_heartbeat", None)  # databases have heartbeats, journals have none
        if record:
            record(trial)


def outcome_of(trial: FrozenTrial) -> dict[str, Any]:
    """What came of a trial; empty where nothing did yet."""
    found: dict[str, Any] = trial.user_attrs.get(_OUTCOME, {})
    return found


def verdict_of(trial: FrozenTrial) -> str:
    """The verdict of a trial; empty while it is under way, also between the two writes of `finish`."""
    if not trial.state.is_finished():
        return ""
    if trial.state == TrialState.FAIL and not outcome_of(trial):
        return ABANDONED  # its heartbeat stopped
    return str(outcome_of(trial).get("verdict", ""))


def code_of(trial: FrozenTrial) -> str:
    """The digest of the code that a trial measures."""
    return str(trial.user_attrs.get(_CODE, ""))


@cache
def me() -> str:
    """This process, so that another on the same machine can tell whether it still lives: machine and boot,
    the namespace of its process ids, its id, and when it started.
    """
    return f"{_machine()}/{os.getpid()}/{_start(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Whether the process ran on this machine and has ended. Of other machines nothing is known: False."""
    machine, process, start = _parts(owner)
    return machine == _machine() and _start(int(process)) != start


def _parts(owner: str) -> tuple[str, str, str]:
    """Machine, which has a / of its own, process and start."""
    running, _, start = owner.rpartition("/")
    machine, _, process = running.rpartition("/")
    return machine, process, start


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _start(process: int) -> str:
    """When a process started, in ticks since boot; empty where there is none, or nothing but its remains."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""
