"""The lengths of which packed sequences are timed, and what they are compared with."""

import re

import pytest
import torch

from flashladder.common import console
from flashladder.common.errors import ConfigError
from flashladder.common.measure import packing
from flashladder.common.problem import Problem
from flashladder.tools.commands import packed


@pytest.mark.parametrize("mix", packing.MIXES)
@pytest.mark.parametrize("tokens", [4096, 16384, 20000])
def test_all_tokens_are_in_a_sequence(mix, tokens):
    found = packing.lengths(mix, tokens)
    assert sum(found) == tokens
    assert min(found) > 0
    assert found == packing.lengths(mix, tokens), "the same for a seed"
    assert {"equal": max(found) == 2048, "one long": max(found) == tokens // 2, "spread": len(found) > 1}[mix]


def test_wrong_mixes_are_refused():
    with pytest.raises(ConfigError, match="no mix odd of lengths; there are equal, spread, one long"):
        packing.lengths("odd", 16384)
    with pytest.raises(ConfigError, match="tokens=100: must be at least 4096"):
        packing.lengths("equal", 100)


def test_padding_has_the_longest():
    problem = Problem(operation="packed", seqlens_q=(3, 9, 0), num_heads=2, causal=True)
    assert packing.padded(problem) == Problem(batch=3, seqlen_q=9, num_heads=2, causal=True)


def test_torchs_kernel_takes_what_it_is_given():
    names = [each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[:10] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert console.run(packed.main, packed.parser(), []) == console.EXIT_ERROR
    assert re.search("no NVIDIA driver|no GPU|CUDA", capsys.readouterr().err)
