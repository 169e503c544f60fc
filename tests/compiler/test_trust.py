"""Code is run only from folders that nobody else can write."""

import grp
import os
import stat

import pytest

from flashladder.common import trust
from flashladder.common.compiler import BuildRequest, build_one, prebuilt, translate
from flashladder.common.compiler.compile import machine_code
from flashladder.common.compiler.library import FILE, build_library
from flashladder.common.errors import ConfigError
from flashladder.tests.support.tiny_ladder import make_rung


@pytest.fixture
def cache(tmp_path, monkeypatch):
    cache = tmp_path / "above" / "cache"
    monkeypatch.setenv("FLASHLADDER_CACHE", str(cache))
    return cache


@pytest.fixture
def library(tmp_path, cache):
    """Builds a library, or finds it in the cache."""
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    return lambda: build_library(source, {})


@pytest.fixture
def opened(cache, monkeypatch):
    """Lets others write a file or folder in one of three ways; gives what is refused then."""

    def open_to(path, way):
        me = os.geteuid()
        if way == "owner" and me:  # nobody but root can give a file away
            monkeypatch.setattr(os, "geteuid", lambda: me + 1)
            return cache
        if way == "owner":
            os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(trust, "_is_own", lambda _: False)
            path.chmod(path.stat().st_mode | {"group": 0o020, "all": 0o002}[way])
        return path

    return open_to


@pytest.mark.parametrize("way", ["owner", "group", "all"])
@pytest.mark.parametrize("levels", range(4))
def test_a_library_that_others_could_have_written_is_refused(library, opened, monkeypatch, levels, way):
    """The file itself, its folder, that of all libraries, or the cache."""
    place = opened([library(), *library().parents][levels], way)
    with pytest.raises(
        ConfigError, match=f"{place} (belongs to|can be written by)(.|\n)*chown(.|\n)*FLASHLADDER_TRUST=1"
    ):
        library()
    monkeypatch.setenv("FLASHLADDER_TRUST", "1")
    assert library().name == FILE


@pytest.mark.parametrize("is_built", [False, True])
def test_a_cache_in_a_folder_that_all_can_write(library, cache, is_built):
    """There they could put another in its place, unless it is one like /tmp."""
    cache.mkdir(parents=True)
    if is_built:
        library()
    cache.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{cache.parent} can be written by everybody"):
        library()
    cache.parent.chmod(0o1777)
    assert library().exists()


def test_a_link_to_a_folder_that_all_can_write(library, cache, tmp_path):
    target = tmp_path / "target" / "cache"
    target.mkdir(parents=True)
    target.parent.chmod(0o777)
    cache.parent.mkdir()
    cache.symlink_to(target)
    with pytest.raises(ConfigError, match=f"{target.parent} can be written by everybody"):
        library()


def test_kernels_that_others_could_have_written_are_refused(tmp_path, cache, monkeypatch):
    version = make_rung(tmp_path / "ladder")
    request = BuildRequest(version, version.config(), "sm_80", lines=False)
    adopted = tmp_path / "adopted"
    (kept,) = prebuilt.compile_into(adopted / prebuilt.KERNELS, [request])
    monkeypatch.setenv("FLASHLADDER_ADOPTED", str(adopted))
    assert prebuilt.find(version, request.config, "sm_80").directory == kept
    kept.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{kept} can be written by everybody"):
        prebuilt.find(version, request.config, "sm_80")
    cache.chmod(0o777)
    for ask in (build_one, translate, lambda *_: machine_code([request])):
        with pytest.raises(ConfigError, match=f"{cache} can be written by everybody"):
            ask(version, version.config(), "sm_80")


def test_what_is_built_can_be_written_by_nobody_else_whatever_the_umask(tmp_path, cache, library):
    version = make_rung(tmp_path / "ladder")
    before = os.umask(0)
    try:
        library()
        translate(version, version.config(), "sm_80")
        build_one(version, version.config(), "sm_80")
        machine_code([BuildRequest(version, version.config(), "sm_80")])
    finally:
        os.umask(before)
    modes = {path: stat.filemode(path.stat().st_mode) for path in (cache.parent, cache, *cache.rglob("*"))}
    assert len(modes) > 20
    assert {path: mode for path, mode in modes.items() if mode[5] == "w" or mode[8] == "w"} == {}
    assert library().exists()


@pytest.mark.parametrize(
    ("name", "members", "is_own"), [("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("us", [], False)]
)
def test_a_group_of_one_s_own_may_write(library, cache, monkeypatch, name, members, is_own):
    """As on the many systems whose umask is 002."""
    library()
    cache.chmod(0o775)
    os.chown(cache, -1, os.getgid())
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group((name, "x", 1000, members)))
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda _: type("user", (), {"pw_name": "me"}))
    monkeypatch.setattr(trust, "ROOTS", -1)
    if is_own:
        library()
    else:
        with pytest.raises(ConfigError, match=f"{cache} can be written by the group {os.getgid()}"):
            library()
