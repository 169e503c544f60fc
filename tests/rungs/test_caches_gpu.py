"""The ladders of caches, decode and MLA, on a real GPU (`pytest -m gpu`): real sizes, every rung."""

import pytest

from flashladder.common import catalog
from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.tests.support.right_on_gpu import require_right_on_a_gpu

pytestmark = pytest.mark.gpu
DECODE = {"operation": "decode", "num_heads": 32, "num_heads_k": 8, "head_dim": 128}
LATENTS = {"operation": "mla", "num_heads_k": 1, "head_dim": 576, "head_dim_v": 512}
OF_MLA = catalog.launched("mla", "sm_90a")[:3]
OF_DECODE = [catalog.find(name) for name in ("decode/06", "decode/07", "decode/10", "decode/13")]
LENGTHS = [(1,), (1024,), (8192, 0, 1, 777), (700,) * 64]


def require_right(rung, usual, runs=3, **sizes):
    task = Problem(**{"seqlen_q": 1} | usual | sizes)
    if not rung.takes(task):
        pytest.skip(f"{rung.name} does not take {task.name}")
    require_right_on_a_gpu(rung, task, runs=runs)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("rung", catalog.versions(ladder="mla"), ids=lambda rung: rung.name)
def test_latents(rung, heads, lengths):
    require_right(rung, LATENTS, num_heads=heads, seqlens_k=lengths)


ROWS = {
    "8 bits": {"options": {"fp8_rows": True}},
    "8 bits, rows": {"seqlen_q": 4, "causal": True, "options": {"fp8_rows": True, "page_size": 1}},
    "8 bits, lists": {"options": {"fp8_rows": True, "sparse": True}},
    "lists": {"options": {"sparse": True}, "dtype": "fp16"},
    "pages of 24": {"options": {"page_size": 24}},
    "512 + 0": {"head_dim": 512},
    "128 + 32": {"head_dim": 160, "head_dim_v": 128},
}


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
@pytest.mark.parametrize("heads", [8, 32, 128])
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("rung", OF_MLA, ids=lambda rung: rung.name)
def test_latents_of_other_kinds(rung, kind, heads, lengths):
    require_right(rung, LATENTS, num_heads=heads, seqlens_k=lengths, **ROWS[kind])


@pytest.mark.parametrize("options", [{}, {"paged": True, "page_size": 64}, {"paged": True, "page_size": 16}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("rung", catalog.versions(ladder="decode"), ids=lambda rung: rung.name)
def test_keys_and_values(rung, head_dim, lengths, options):
    require_right(rung, DECODE, head_dim=head_dim, seqlens_k=lengths, options=options)


FP8 = {"fp8_cache": True, "paged": True, "page_size": 16}
SERVED = {
    "sinks": {"sinks": True},
    "sinks, a window": {"sinks": True, "window_left": 127, "causal": True},
    "a tree": {"seqlen_q": 24, "causal": True, "options": {"tree": True, "paged": True}},
    "8 bits": {"sinks": True, "options": {**FP8, "tensor_scales": True}},
    "8 bits, a window": {"sinks": True, "window_left": 127, "causal": True, "options": FP8},
    "8 bits, pages, new keys": {"options": {**FP8, "page_scales": True, "new_keys": True, "rotary": True}},
    "8 bits, a tree": {"seqlen_q": 8, "causal": True, "options": {**FP8, "tree": True}},
}


@pytest.mark.parametrize("lengths", [(8192, 0, 1, 777), (700,) * 64], ids=["few", "many"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("rung", catalog.launched("decode", "sm_90a"), ids=lambda rung: rung.name)
def test_what_servers_ask_for(rung, kind, head_dim, lengths):
    require_right(rung, DECODE, head_dim=head_dim, seqlens_k=lengths, **SERVED[kind])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rung", [*OF_MLA, *OF_DECODE], ids=lambda rung: rung.address)
def test_every_family_of_inputs(rung, family, dtype):
    """Of sequences in several parts, one of them short: the rungs that models run."""
    if (family, dtype) == ("largest_values", "bf16"):
        pytest.skip("O is beyond fp32 before a row meets its key: several keys tie until then, and P is 1 at each")
    usual = LATENTS | {"num_heads": 64} if rung in OF_MLA else DECODE
    require_right(rung, usual, runs=1, seqlens_k=(4000, 70), dtype=dtype, family=family)
