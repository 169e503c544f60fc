"""Kernels of rung 02 that were never compiled, for tests of everything but the compiler."""

import hashlib
from collections import defaultdict

from flashladder.common import catalog
from flashladder.common.compiler.artifact import Artifact, LaunchInfo, RungKernel
from flashladder.common.problem.problem import Problem
from flashladder.tests.support.simulated_bench import time_us
from flashladder.tuner.candidates import Candidate, Stock
from flashladder.tuner.space import Space

PROBLEM = Problem(batch=1, num_heads=2, seqlen_q=256)


def make_space(problems=(PROBLEM,), levels=(3,)):
    return Space.of(catalog.find("02"), problems, only={"ptxas_level": levels})


def make_stock(folder, space=None, every=1):
    """As if v_fragments made no difference. `every`: only each so-many-th kernel."""
    space = space or make_space()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.log").write_text("")
    alike = defaultdict(list)
    for config in [space.default, *space.configs]:
        values = {**config.as_dict(), "v_fragments": 0}
        code = hashlib.sha256(str(values).encode()).hexdigest()[:16]
        if config not in alike[code]:
            alike[code].append(config)
    kernels = [
        Candidate(code, tuple(configs), tuple(_artifact(folder, space.full(configs[0], p)) for p in space.problems))
        for code, configs in list(alike.items())[::every]
    ]
    return Stock(space, tuple(kernels), {"spills more than 256 bytes a thread": 3})


def make_predictions(stock):
    """Times of a model that knows the tile, and nothing of fragments."""
    return {kernel.code: time_us(kernel.config) * (1 + kernel.config.q_fragments / 40) for kernel in stock.kernels}


def _artifact(folder, config):
    launch = LaunchInfo(config.num_warps * 32, 49152, config.block_m, config.block_n, 96)
    return Artifact(
        version="02_swizzling",
        config=config,
        arch="sm_90a",
        directory=folder,
        kernels=(RungKernel("attention_forward", launch, 128, 0, 0, 0),),
        operation="forward",
        compile_seconds=1.0,
        cached=True,
    )
