"""The references on a GPU, each in a process of its own as a person runs it."""

import pytest

from flashladder.common import catalog
from flashladder.common.measure.references import missing
from flashladder.common.paths import ROOT
from flashladder.tests.support import triton_process

pytestmark = pytest.mark.gpu
SHAPES = {
    "whole tiles": "--batch 2 --heads 4 --heads-k 2 --seqlen 512",
    "causal": "--batch 2 --heads 4 --seqlen-q 256 --seqlen-k 1024 --causal --dtype fp16",
    "blind rows": "--heads 4 --seqlen-q 512 --seqlen-k 128 --causal --layout padded",
    "small heads": "--heads 4 --seqlen 512 --head-dim 64 --causal",
}
ANY_LENGTH = {
    "odd lengths": "--heads 3 --seqlen-q 333 --seqlen-k 77 --layout bhsd",
    "one query": "--heads 8 --heads-k 1 --seqlen-q 1 --seqlen-k 4097 --causal",
}


def run(name, options):
    """What `flashladder run` prints; the test fails where it does."""
    if reason := missing(catalog.find_implementation(name)):
        pytest.skip(reason)
    command = [ROOT / "tools" / "run_version.py", name, "--device", "gpu", "--no-log", *options.split()]
    done = triton_process.run(*command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["py_fa1", "py_fa2", "triton", "cute"])
@pytest.mark.parametrize("shape", SHAPES)
def test_right(name, shape):
    assert "PASS" in run(name, f"{SHAPES[shape]} --batch 2 --no-measure")


@pytest.mark.parametrize("name", ["py_fa1", "py_fa2", "triton"])
@pytest.mark.parametrize("shape", ANY_LENGTH)
def test_right_at_any_length(name, shape):
    assert "PASS" in run(name, f"{ANY_LENGTH[shape]} --batch 2 --no-measure")


@pytest.mark.alone
@pytest.mark.parametrize("name", ["triton", "cute"])
def test_timed_beside_the_official_kernel(name):
    out = run(name, "--batch 2 --heads 8 --seqlen 1024 --rounds 4")
    assert "FlashAttention-2 (torch)" in out
    assert "faster" in out or "slower" in out or "tied" in out or "unclear" in out


def test_tile_that_triton_chose_is_shown():
    assert "block_m: " in run("triton", "--batch 1 --heads 2 --seqlen 512 --no-measure")
