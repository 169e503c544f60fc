"""How the C++ way of a call is made: its layout is Python's, and what it lacks is said; see runtime/fast_path.py."""

import ctypes
import re
import subprocess
import threading

import pytest

from flashladder.common.compiler import library
from flashladder.common.errors import BuildError
from flashladder.common.runtime import fast_path, plan
from flashladder.tests.support import fake_cuda


def test_the_plan_has_the_layout_of_the_source(tmp_path):
    """A translation unit of the source and of what Python takes its structures for."""
    checks = [
        f"static_assert(offsetof({kind.__name__}, {name}) == {getattr(kind, name).offset});"
        for kind in (plan.TensorPlan, plan.FieldPlan, plan.MapPlan, plan.KernelPlan, plan.WorkspacePlan, plan.Plan)
        for name, *_ in kind._fields_
    ]
    checks += [f"static_assert(sizeof(Plan) == {ctypes.sizeof(plan.Plan)});"]
    checks += [f"static_assert(sizeof(LaunchConfig) == {ctypes.sizeof(fake_cuda.LaunchConfig)});"]
    checks += [f"static_assert(max_params == {plan.MAX_PARAMS} && max_sizes == {plan.MAX_SIZES});"]
    source = tmp_path / "check.cpp"
    source.write_text("\n".join(["#include <cstddef>", f'#include "{fast_path.SOURCE}"', *checks]))
    command, _ = library.extension_command(source)
    subprocess.run([*command, "-fsyntax-only", source], check=True)


@pytest.fixture
def unprepared(monkeypatch, tmp_path):
    """As in a process that has called nothing yet, with an empty cache."""
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fast_path, "extension", None)
    for name in ("missing", "node", "node_missing"):
        monkeypatch.setattr(fast_path, name, getattr(fast_path, name))


def test_it_is_compiled_beside_the_program(unprepared, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def compiled(source):
        began.set()
        go_on.wait(60)
        raise BuildError("no room\non the disk")

    monkeypatch.setattr(fast_path, "missing", fast_path.NOT_ASKED)
    monkeypatch.setattr(library, "build_extension", compiled)
    fast_path.prepare()
    fast_path.prepare()
    assert began.wait(60)
    assert (fast_path.extension, fast_path.missing) == (None, "it is being compiled")
    (thread,) = [each for each in threading.enumerate() if "fast_path.cpp" in each.name]
    go_on.set()
    thread.join(60)
    assert (fast_path.extension, fast_path.missing) == (None, "no room")


@pytest.mark.parametrize(
    ("holder", "name", "value", "words"),
    [
        (
            library.sysconfig,
            "get_path",
            lambda name: "/no/such",
            "no Python.h in /no/such: Python's headers are missing",
        ),
        (
            fast_path,
            "EXCHANGE",
            "__no_such__",
            "torch .* has no __no_such__, by which C\\+\\+ reads tensors; torch 2.13 has",
        ),
    ],
)
def test_what_else_is_missing_is_named(unprepared, monkeypatch, holder, name, value, words):
    monkeypatch.setattr(holder, name, value)
    fast_path.load()
    assert fast_path.extension is None
    assert re.match(words, fast_path.missing)


def test_without_a_compiler_calls_go_through_python(unprepared, monkeypatch):
    monkeypatch.setenv("NVCC_CCBIN", "no-such-compiler")
    fast_path.load()
    assert fast_path.extension is None
    assert fast_path.missing.startswith("no C++ compiler for nvcc: no-such-compiler is not on PATH")


def test_turned_off_nothing_is_compiled_or_loaded(unprepared, monkeypatch):
    """Where it is built already, too."""
    monkeypatch.setattr(fast_path, "missing", fast_path.NOT_ASKED)
    monkeypatch.setenv("FLASHLADDER_FAST", "0")
    monkeypatch.setattr(library, "build_extension", None)
    monkeypatch.setattr(library, "find_extension", lambda source: source)
    threads = threading.active_count()
    fast_path.prepare()
    assert (fast_path.extension, fast_path.missing) == (None, "FLASHLADDER_FAST=0 turns it off")
    assert threading.active_count() == threads
