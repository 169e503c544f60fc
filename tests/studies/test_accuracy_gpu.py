"""The rungs on a GPU over families of inputs and long rows, beside FlashAttention-2; see test_accuracy.py."""

import dataclasses

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler.compile import build_one
from flashladder.common.measure import baselines
from flashladder.common.measure.entrants import Entrant, Launched
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.common.runtime import gpu, target
from flashladder.common.runtime.execute import on_gpu
from flashladder.common.studies.accuracy import study
from flashladder.tests.studies.test_accuracy import known_to_miss, lone_top

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU on this machine"),
]

RUNGS = [version for version in catalog.versions() if version.number >= "16" and version.takes(Problem())]


@pytest.fixture(params=RUNGS, ids=lambda version: version.name)
def version(request):
    return request.param


def missed_bars(version, dtype, **options):
    official = [baselines.official("forward")]
    place = target.resolve("gpu", None)
    version.check_arch(place.arch)
    asked = study.Study([Entrant(version.number, version, {})], place, official, dtypes=(dtype,), **options)
    found = [row for rows in study.rows(asked) for row in rows]
    ours = [row for row in found if row["version"] == version.name]
    assert len(ours) == len(asked.families) * len(asked.lengths)
    assert {row["yardstick"] for row in ours} == {baselines.official("forward").name}
    return {(row["family"], row["seqlen_k"]): row["missed"] for row in ours if row["verdict"] == study.MISSED}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_family(version, dtype):
    assert missed_bars(version, dtype, lengths=(128, 512, 4096), rows=256, heads=2) == known_on_a_gpu(version, dtype)


def known_on_a_gpu(version, dtype):
    """By family and keys. In one block of 128 keys the P of keys before a jump leave fp16's range; FlashAttention-2's
    blocks have 64, and its own error, the yardstick, is larger for runner_up than the emulator's. Rungs 48 and 49 round
    P and its sum alike; where m lags, P of keys before a jump have fewer bits in fp16.
    """
    if version.number in ("48", "49"):
        return {("jump_key", keys): "rms mean" for keys in (128, 512)} if dtype == "fp16" else {}
    block_n = version.config_for(Problem(dtype=dtype)).block_n
    known = {("jump_key", 128): "rms"} if (dtype, block_n) == ("fp16", 128) else {}
    missed = {family: bar for family, bar in known_to_miss(version.number, dtype).items() if family != "runner_up"}
    return known | {(family, keys): bar for family, bar in missed.items() for keys in (512, 4096)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_calls(dtype):
    """They are at most 1.05 times as far from exact ones as FlashAttention-2's."""
    official, place = baselines.official("backward"), target.resolve("gpu", None)
    sizes = {"lengths": (128, 512, 4096), "rows": 256, "heads": 2}
    asked = study.Study([Launched("backward")], place, [official], dtypes=(dtype,), operation="backward", **sizes)
    found = [row for rows in study.rows(asked) for row in rows]
    assert {row["yardstick"] for row in found} == {official.name}
    judged = [row for row in found if row["verdict"] != study.YARDSTICK]
    assert len(judged) == len(asked.families) * len(asked.lengths) * 3
    assert [(row["family"], row["seqlen_k"], row["gradient"]) for row in judged if row["verdict"] == study.MISSED] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_plateaus_of_many_keys(version, dtype):
    families = ("equal_keys", "plateau_2", "plateau_3", "plateau_4", "plateau_rows", "plateau_below", "lone_top")
    # 240 CTAs of 64 rows: with fewer than 1.6 for each SM the yardstick splits the keys, and loses less than usual.
    assert missed_bars(version, dtype, families=families, lengths=(16384, 131072), rows=2560) == {}


def test_many_small_weights_count(version):
    problem, tensors, expected = lone_top(4096)
    assert expected == pytest.approx(0.1042, rel=1e-3)
    on_device = make_inputs(problem, "cuda")
    for name in "qkv":
        getattr(on_device, name).copy_(getattr(tensors, name))
    on_gpu(build_one(version, version.config_for(problem), gpu.device_arch()), problem, on_device)()
    assert (on_device.o / expected - 1).abs().max() < 2e-3


def test_every_baseline_gives_its_lse():
    """What gives one gives the right one, in natural logarithms."""
    problem = Problem(batch=2, num_heads=4, seqlen_q=256, seqlen_k=512, family="sinks")
    tensors = make_inputs(problem, "cuda")
    exact = study.exact(problem, tensors)
    for baseline in baselines.of("forward").values():
        if not (baseline.missing() or baseline.refusal(problem)):
            o, lse = baseline.prepare(problem, tensors)()
            assert lse is None or (lse - exact.lse).abs().max() < 1e-4, baseline.name
            bare, _ = baseline.prepare(dataclasses.replace(problem, lse=False), tensors)()
            assert torch.allclose(bare, o, rtol=0.02, atol=0.02), f"{baseline.name} without it"
