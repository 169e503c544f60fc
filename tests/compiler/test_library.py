"""Libraries of C for the CPU: built once, again when anything changes, and never half in place."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from flashladder.common import host
from flashladder.common.compiler.library import build_extension, build_library, find_extension
from flashladder.common.errors import BuildError, ToolchainError


def test_library_is_built_once_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return VALUE; }\n")
    first = build_library(source, {"VALUE": "1"})
    stamp = first.stat().st_mtime_ns
    assert build_library(source, {"VALUE": "1"}) == first
    assert first.stat().st_mtime_ns == stamp
    assert build_library(source, {"VALUE": "2"}) != first
    monkeypatch.setattr(host, "identity", lambda: "another CPU")
    assert build_library(source, {"VALUE": "1"}) != first
    source.write_text("int answer(void) { return; }\n")
    with pytest.raises(BuildError, match=r"(?s)answer.c cannot be compiled:.*error"):
        build_library(source, {})
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no-such-compiler is not on PATH"):
        build_library(source, {})


def test_a_library_that_cannot_be_put_in_its_place_is_no_path(tmp_path, monkeypatch):
    """Another process's is as good; a full disk is not."""
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 1; }\n")
    rename = Path.rename

    def refuse(path, target):
        if path.is_dir():  # the library's folder, not a lock
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    def lose_the_race(path, target):
        if path.is_dir():
            shutil.copytree(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(BuildError, match=r"the library cannot be moved to .*answer-\w+: No space left on device"):
        build_library(source, {})
    monkeypatch.setattr(Path, "rename", lose_the_race)
    assert build_library(source, {}).exists()


def test_an_extension_is_found_once_it_is_built(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 1; }\n')
    assert find_extension(source) is None
    assert build_extension(source) == find_extension(source)
