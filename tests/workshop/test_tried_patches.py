"""The repository's patches of what was tried: each is in a log or on a page, and makes its rung again."""

import re
import subprocess

import pytest

from flashladder.common import own
from flashladder.common.catalog import find, schema
from flashladder.common.compiler.sources import Sources
from flashladder.common.errors import ConfigError
from flashladder.common.paths import CUDA_HEADERS, ROOT, VERSIONS
from flashladder.common.records.log import Log
from flashladder.common.report.pages import documents
from flashladder.common.workshop import scaffold, tried

LOGS = sorted(VERSIONS.glob("*/[0-9]*/tried.csv"))


def rows(log):
    return Log(log, tried.SCHEMA).read()[0]


KEPT = [
    pytest.param(row, log.parent / row.patch, id=f"{log.parent.name[:2]}-{row.run}")
    for log in LOGS
    for row in rows(log).drop_duplicates("patch").itertuples()
    if row.patch
]

WITHOUT_A_LOG = [
    path for path in sorted(VERSIONS.glob("*/[0-9]*/tried/*.patch")) if path.parents[1] / "tried.csv" not in LOGS
]


def has_changed(parent, commit):
    """Whether a rung's files are no longer those of a commit; forward's may have lain in versions/ itself then."""
    commit = commit.rstrip("+")
    files = [*Sources().closure(parent.kernel), parent.directory / schema.FILE]
    return git("cat-file", "-e", f"{commit}^{{commit}}") is not None and any(
        path.read_bytes() not in (git("show", f"{commit}:{name}") for name in names(path)) for path in files
    )


def names(path):
    name = path.relative_to(ROOT).as_posix()
    return name, name.replace("versions/forward/", "versions/")


def git(*arguments):
    """What git prints; None where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    return None if done.returncode else done.stdout


@pytest.mark.git
@pytest.mark.parametrize(("row", "patch"), KEPT)
def test_a_kept_patch_fits_its_rung_or_that_of_its_commit(row, patch, tmp_path, monkeypatch):
    monkeypatch.setenv(own.VARIABLE, str(tmp_path))
    misfit = ""
    try:
        made = scaffold.make("again", row.parent, private=True, patch=patch)
    except ConfigError as error:
        misfit = str(error)
    else:
        assert tried.patch(made, find(row.parent)), "it changes something"
    assert not misfit or has_changed(find(row.parent), row.commit), misfit


@pytest.mark.git
@pytest.mark.parametrize("patch", WITHOUT_A_LOG, ids=lambda patch: patch.stem)
def test_a_patch_without_a_log_fits_the_rung_of_the_commit_that_its_page_names(patch, tmp_path):
    rung = patch.parents[1]
    (commit,) = re.findall(r"the rung as it was at commit (\w+)", (rung / documents.PAGE).read_text())
    changes = scaffold._changes(patch)
    for name in changes:
        places = (folder.relative_to(ROOT) / name for folder in (rung, rung.parent / "cuda", CUDA_HEADERS))
        if text := next(filter(None, (git("show", f"{commit}:{place.as_posix()}") for place in places)), None):
            (tmp_path / name).write_bytes(text)
    scaffold._apply(patch, changes, tmp_path)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.parent.name[:2])
def test_every_trial_has_a_run_and_every_patch_a_row(log):
    folder = log.parent / "tried"
    files = {f"tried/{path.name}" for path in folder.iterdir()} if folder.exists() else set()
    assert {*rows(log)["patch"]} - {""} == files
    assert rows(log)["run"].is_unique
