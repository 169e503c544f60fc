"""What the emulator tells of long runs: how long they will take, where they are, and a loop that never ends."""

import time
from types import SimpleNamespace

import pytest

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.emulator.errors import InstructionBudgetError
from flashladder.common.emulator.execute import scheduler
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import execute
from flashladder.tests.support.tiny_ladder import make_rung

ENDLESS = 'for (int i = 0;; ++i)\n        asm volatile("// %0" ::"r"(i));'


@pytest.fixture(scope="module")
def swizzling():
    version = catalog.find("02")
    return translate(version, version.config(), "sm_90a")


def test_a_loop_that_never_ends_is_found_soon_and_named(tmp_path):
    version = make_rung(tmp_path, body=ENDLESS)
    problem = Problem(seqlen_q=64, head_dim=64)
    artifact = translate(version, version.config_for(problem), "sm_80")
    line = version.kernel.read_text().splitlines().index("    for (int i = 0;; ++i)") + 1
    began = time.monotonic()
    with pytest.raises(InstructionBudgetError, match=rf"endless loop\?\n.*at kernel\.cu:({line}|{line + 1}): "):
        execute.on_emulator(artifact, problem, make_inputs(problem))
    assert time.monotonic() - began < 60


def test_the_budget_grows_with_the_problem(swizzling):
    small, large = (
        execute._budget(1000, Problem(num_heads=2, seqlen_q=64, seqlen_k=keys), swizzling, 2) for keys in (64, 65536)
    )
    assert small == execute.LEAST_BUDGET
    assert large == 1000 * 65536
    several_tiles_a_cta = execute._budget(1000, Problem(num_heads=2, seqlen_q=640, seqlen_k=640), swizzling, 4)
    assert several_tiles_a_cta == 1000 * 640 * 5


def test_a_run_says_now_and_then_where_it_is(swizzling, monkeypatch):
    monkeypatch.setattr(scheduler, "SECONDS", 0.0)
    problem, told = Problem(seqlen_q=64, seqlen_k=64), []
    execute.on_emulator(swizzling, problem, make_inputs(problem), progress=lambda *what: told.append(what))
    assert told[0] == (0, 1)
    assert told[-1] == (1, 1)
    places = [where for done, total, where in told[1:-1] if (done, total) == (0, 1)]
    assert any(where.startswith("warp 3 ") and "kernel.cu:" in where for where in places)


def test_a_long_run_is_announced(swizzling, monkeypatch, capsys):
    problem = Problem(seqlen_q=128)
    execute.on_emulator(swizzling, problem, make_inputs(problem), progress=lambda *what: None)
    assert "on the emulator" not in capsys.readouterr().err, "a short one is not"
    monkeypatch.setattr(execute, "LONG_FLOPS", 0)
    monkeypatch.setattr(execute, "emulation_seconds", lambda artifact, problem, race: 1234.0)
    execute.on_emulator(swizzling, problem, make_inputs(problem), progress=lambda *what: None)
    assert "about 21 min on the emulator, for 2 CTAs" in capsys.readouterr().err


def test_how_long_a_run_takes_follows_from_two_short_ones(swizzling, monkeypatch):
    """As if each 32 CTAs took 2 s, and 0.5 s more for each block of keys."""
    seen = []

    def emulate(artifact, problem, tensors, race):
        ctas, blocks = problem.num_heads * problem.seqlen_q // 64, problem.seqlen_k // 64
        seen.append((ctas, blocks))
        return SimpleNamespace(elapsed=ctas / 32 * (2 + 0.5 * blocks))

    monkeypatch.setattr(execute, "on_emulator", emulate)
    problem = Problem(batch=2, num_heads=4, seqlen_q=4096, seqlen_k=6400)  # 512 CTAs, 100 blocks
    assert execute.emulation_seconds(swizzling, problem, race=True) == pytest.approx(512 / 32 * (2 + 0.5 * 100))
    assert all(ctas <= execute.CHUNK and blocks <= 3 for ctas, blocks in seen)
