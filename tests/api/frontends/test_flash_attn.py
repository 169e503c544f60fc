"""flash-attn's names: its signatures, its layouts and results, and a refusal by name of what kernels do not do."""

import inspect
import itertools
import re

import numpy as np
import pytest
import torch

import flashladder
from flashladder import attention, packed_attention
from flashladder.common.api import operator, validate
from flashladder.common.api.options import Options
from flashladder.common.errors import UnsupportedProblemError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# As in FlashAttention-3 and vLLM's fork.
OF_PAGES = "*, seqused_q=None, seqused_k=None, s_aux=None, k_descale=None, v_descale=None, num_splits=0, out=None"
SIGNATURES = {  # of flash-attn 2.8: flash_attn/flash_attn_interface.py
    "flash_attn_func": f"(q, k, v, {OPTIONS}, *, s_aux=None)",
    "flash_attn_kvpacked_func": f"(q, kv, {OPTIONS})",
    "flash_attn_qkvpacked_func": f"(qkv, {OPTIONS})",
    "flash_attn_varlen_func": f"(q, k, v, {LENGTHS}, {OPTIONS}, block_table=None, {OF_PAGES})",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {LENGTHS}, {OPTIONS})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {OPTIONS})",
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def drawn(*shape, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_are_flash_attns(name):
    signature = inspect.signature(getattr(flashladder, name))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]
    assert name in dir(flashladder)


def test_it_is_attention(device):
    q, k, v = drawn(1, 20, 2, 64, device=device), *drawn(2, 1, 56, 1, 64, device=device)
    expected, lse = attention(q, k, v, causal=True, softmax_scale=0.3, return_lse=True)
    assert torch.equal(flashladder.flash_attn_func(q, k, v, 0.0, 0.3, True, deterministic=True), expected)
    window = {"window_size": (56, 0), "softmax_scale": 0.3}  # as wide as all keys, and none to the right: causal
    out, softmax_lse, probabilities = flashladder.flash_attn_func(q, k, v, **window, return_attn_probs=True)
    assert torch.equal(out, expected)
    assert torch.equal(softmax_lse, lse)
    assert (probabilities.numel(), probabilities.dtype) == (0, torch.bfloat16)
    window["window_size"] = torch.tensor(window["window_size"])
    assert torch.equal(flashladder.flash_attn_func(q, k, v, **window), expected)
    kv = torch.stack((k, v), 2)
    assert torch.equal(flashladder.flash_attn_kvpacked_func(q, kv, 0.0, 0.3, True), expected)


def test_packed_by_rows(device):
    qkv = drawn(1, 40, 3, 1, 64, device=device)
    expected = attention(*qkv.unbind(2), causal=True)
    assert torch.equal(flashladder.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    whole = (int32(0, 40, device=device), 40)
    options = {"causal": True, "return_attn_probs": True}
    assert torch.equal(flashladder.flash_attn_varlen_qkvpacked_func(qkv[0], *whole, **options)[0], expected[0])


def test_sequences_of_any_length(device):
    """Also empty ones, in q, in k, or in both, and rows that belong to none."""
    rows, keys = (0, 24, 24, 30, 33, 33), (0, 8, 20, 20, 57, 57)
    q, k, v = drawn(36, 2, 64, device=device), *drawn(2, 57, 1, 64, device=device)
    sequences = (int32(*rows, device=device), int32(*keys, device=device), 24, 37)
    out, lse, _ = flashladder.flash_attn_varlen_func(q, k, v, *sequences, causal=True, return_attn_probs=True)
    assert (out.shape, lse.shape) == (q.shape, (2, 36))
    bounds = zip(itertools.pairwise(rows), itertools.pairwise(keys), strict=True)
    for (begin, end), (first, last) in bounds:
        if end > begin and last > first:
            inputs = (q[None, begin:end], k[None, first:last], v[None, first:last])
            alone, alone_lse = attention(*inputs, causal=True, return_lse=True)
            assert torch.equal(out[begin:end], alone[0])
            assert torch.equal(lse[:, begin:end], alone_lse[0])
        else:
            assert (out[begin:end] == 0).all()
            assert (lse[:, begin:end] == -torch.inf).all()
    assert (out[33:] == 0).all()
    assert (lse[:, 33:] == -torch.inf).all()
    kv = torch.stack((k, v), 1)
    options = {"causal": True, "return_attn_probs": True}
    assert torch.equal(flashladder.flash_attn_varlen_kvpacked_func(q, kv, *sequences, **options)[0], out)


@pytest.mark.parametrize("page_size", [1, 16, 40])
def test_keys_in_pages(device, page_size):
    """Chunks of prompts, also of none, against what came before; NaN where no key of theirs lies."""
    rows, keys, pages = (0, 10, 10, 40, 41), (0, 30, 47, 47, 131), 84 // page_size + 1
    q, whole = drawn(41, 2, 64, device=device), drawn(2, 131, 1, 64, device=device)
    order = torch.randperm(5 * pages, generator=torch.Generator().manual_seed(1))[: 4 * pages].view(4, pages).to(device)
    paged = torch.full((2, 5 * pages, page_size, 1, 64), torch.nan, device=device).bfloat16()
    for sequence, (first, last) in enumerate(itertools.pairwise(keys)):
        for key in range(last - first):
            paged[:, order[sequence, key // page_size], key % page_size] = whole[:, first + key]
    sequences = (int32(*rows, device=device), int32(*keys, device=device), 30, 84)
    options = {"causal": True, "window_size": (50, 0), "return_attn_probs": True}
    out, lse, _ = flashladder.flash_attn_varlen_func(q, *paged, *sequences, block_table=order.int(), **options)
    expected, its_lse, _ = flashladder.flash_attn_varlen_func(q, *whole, *sequences, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=0.03)
    torch.testing.assert_close(lse, its_lse, rtol=0, atol=1e-3)


def test_a_window_and_a_softcap(device):
    """Of a sequence alone and among others: scores by the textbook, in fp64."""
    q, k, v = drawn(1, 40, 2, 64, device=device), *drawn(2, 1, 50, 1, 64, device=device)
    out, lse, _ = flashladder.flash_attn_func(q, k, v, 0.0, 0.1, True, (7, 3), 5.0, return_attn_probs=True)
    scores = 5 * torch.tanh(0.1 * torch.einsum("bqhd,bkod->bhqk", q.double(), k.double()) / 5)
    own, key = torch.arange(40, device=device)[:, None] + 10, torch.arange(50, device=device)
    scores.masked_fill_((key > own) | (key < own - 7), -torch.inf)
    expected = torch.einsum("bhqk,bkod->bqhd", scores.softmax(-1), v.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-4)
    sequences = (int32(0, 40, device=device), int32(0, 50, device=device), 40, 50)
    options = {"softmax_scale": 0.1, "window_size": (7, 0), "softcap": 5.0, "return_attn_probs": True}
    among = flashladder.flash_attn_varlen_func(q[0], k[0], v[0], *sequences, **options)
    assert torch.equal(among[0], out[0])
    assert torch.equal(among[1], lse[0])


def test_an_output_of_ones_own(device):
    q = drawn(1, 16, 1, 64, device=device)
    o = torch.zeros_like(q)
    window = {"window": (7, None), "softcap": 5.0, "softmax_scale": 0.1, "causal": True, "return_lse": True}
    assert attention(q, q, q, out=o, **window)[0] is o
    assert torch.equal(o, attention(q, q, q, **window)[0])
    with pytest.raises(UnsupportedProblemError, match=r"out is \(1, 16, 1, 64\) torch.float16 .*; O is .*bfloat16"):
        attention(q, q, q, out=o.half(), **window)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": (-1, None)}, "window=-1: must be at least 0"),
        ({"softcap": -1.0}, "softcap=-1.0: must be a positive number up to 1000, or 0 for none"),
        ({"window": (3, None), "version": "34"}, "has no sliding window"),
    ],
)
def test_windows_and_softcaps_that_are_none(options, words):
    q = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblemError, match=words):
        attention(q, q, q, **options)


@pytest.mark.parametrize(
    ("window", "seqlen_k", "seen"),
    [
        ((-1, -1), 9, (False, None, None)),
        ((-1, 0), 9, (True, None, None)),
        ((9, 9), 9, (False, None, None)),
        ((8, 0), 9, (True, 8, None)),
        ((8, 2), 9, (False, 8, 2)),
        ((-1, 2), 9, (False, None, 2)),
    ],
)
def test_windows_are_read_as_flash_attn_does(window, seqlen_k, seen):
    causal, bounds = validate.mask(False, window, seqlen_k)
    assert (causal, *bounds) == seen
    assert validate.mask(True, window, seqlen_k) == (True, (seen[1], None))


@pytest.mark.parametrize("causal", [False, True])
def test_the_default_window_is_open(causal):
    assert validate.mask(causal, validate.ALL, 9) == validate.mask(causal, list(validate.ALL), 9)


def test_torch_sees_through_sequences(device):
    q, k, v = drawn(3, 24, 1, 64, device=device)
    cu_seqlens = int32(0, 16, 24, device=device)
    tensors = (q[None], k[None], v[None], cu_seqlens, cu_seqlens, 16, 16)
    options = Options(*tensors[3:], causal=True, softmax_scale=0.125, version="24")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        operator.attention_general,
        (*tensors[:3], *options.flat(), True),
        test_utils=checks,
    )

    def model(*arguments):
        return flashladder.flash_attn_varlen_func(*arguments, causal=True, return_attn_probs=True)[0] + 1

    arguments = (q, k, v, *tensors[3:])
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*arguments), model(*arguments))


@pytest.mark.gpu
def test_sequences_on_a_gpu_are_read_once_and_again_after_they_were_written(monkeypatch):
    q = torch.zeros(16, 1, 64, dtype=torch.bfloat16, device="cuda")
    cu_seqlens, reads = int32(0, 8, 16, device="cuda"), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    for _ in range(3):
        packed_attention(q, q, q, cu_seqlens, cu_seqlens, 8, 8)
    assert len(reads) == 1
    cu_seqlens[1] = 4
    with pytest.raises(UnsupportedProblemError, match="max_seqlen_q is 8; sequence 1 of cu_seqlens_q has 12 rows"):
        packed_attention(q, q, q, cu_seqlens, cu_seqlens, 8, 8)


def test_sequences_that_torch_did_not_see_written(device):
    """As generated code and CUDA graphs write: what was read before may not decide what comes out."""
    qkv, cu_seqlens = drawn(3, 40, 1, 64, device=device), int32(0, 10, 20, device=device)
    packed_attention(*qkv, cu_seqlens, cu_seqlens, 30, 30)
    cu_seqlens.data.copy_(int32(0, 10, 40, device=device))
    fresh = int32(0, 10, 40, device=device)
    assert torch.equal(
        packed_attention(*qkv, cu_seqlens, cu_seqlens, 30, 30), packed_attention(*qkv, fresh, fresh, 30, 30)
    )


@pytest.mark.parametrize("window", [(None, 2**31 - 1), (2**32 - 1, None), (3, 2**70)], ids=str)
def test_windows_beyond_every_key(window, device):
    """C's int holds none of them."""
    q = drawn(1, 20, 1, 64, device=device)
    near = tuple(None if end is None or end > 20 else end for end in window)
    far, close = (attention(q, q, q, window=each, version="24") for each in (window, near))
    assert torch.equal(far, close)


@pytest.mark.parametrize(
    "window", [None, 3, (3,), (1, 2, 3), (True, 3), (1.0, None), "no", (torch.tensor(3.0), None)], ids=repr
)
def test_what_is_no_window(window):
    q = torch.zeros(20, 1, 64, dtype=torch.bfloat16)
    sequences = (int32(0, 20), int32(0, 20), 20, 20)
    for call in (
        lambda: attention(q[None], q[None], q[None], window=window),
        lambda: packed_attention(q, q, q, *sequences, window=window),
        lambda: flashladder.flash_attn_func(q[None], q[None], q[None], window_size=window),
    ):
        with pytest.raises(
            UnsupportedProblemError, match=r"window(_size)?=.*: it should be \(left, right\), each a number"
        ):
            call()


def test_large_softcaps(device):
    """Up to where they are good; beyond it they are refused, as one that is no number is."""
    q = drawn(1, 20, 1, 64, device=device)
    _, lse = attention(q, q, q, softcap=1000.0, return_lse=True)
    scores = 1000 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q.double(), q.double()) / 8 / 1000)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-4)
    for softcap in (1001.0, 1e30, torch.nan):
        with pytest.raises(
            UnsupportedProblemError, match=re.escape(f"softcap={softcap}: must be a positive number up to 1000")
        ):
            flashladder.flash_attn_func(q, q, q, softcap=softcap)


def test_nothing_to_compute_is_looked_at_all_the_same():
    q, none = torch.zeros(4, 1, 64, dtype=torch.bfloat16), int32(0, 0)
    assert not packed_attention(q, q, q, none, none, 0, 0).any()
    with pytest.raises(UnsupportedProblemError, match="window=-3: must be at least 0"):
        packed_attention(q, q, q, none, none, 0, 0, window=(-3, None))


def test_derivatives_of_forward_mode_are_refused():
    q = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    for call in (lambda x: attention(x, q, q), lambda x: attention(x, q, q, window=(3, None))):
        with pytest.raises(UnsupportedProblemError, match="derivatives of forward mode"):
            torch.func.jvp(call, (q,), (q,))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"dropout_p": 0.1, "return_attn_probs": True}, "dropout_p=0.1: kernels"),
        (
            {"alibi_slopes": torch.ones(3)},
            "alibi_slopes is (3,) torch.float32; with q it is (2,) or (1, 2) torch.float32",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_kernels_do_not_do_is_refused_by_name(option, words):
    q = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)
    sequences = (int32(0, 16), int32(0, 16), 16, 16)
    for call in (
        lambda: flashladder.flash_attn_func(q, q, q, **option),
        lambda: flashladder.flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), **option),
        lambda: flashladder.flash_attn_varlen_func(q[0], q[0], q[0], *sequences, **option),
    ):
        with pytest.raises(UnsupportedProblemError, match=re.escape(words)):
            call()


def test_other_refusals():
    q = torch.zeros(16, 2, 64, dtype=torch.bfloat16)
    sequences = int32(0, 16), int32(0, 16), 16, 16
    packing = torch.zeros(1, 16, 2, 2, 64, dtype=torch.bfloat16)
    for call, words in (
        (
            lambda: flashladder.flash_attn_qkvpacked_func(packing),
            "qkv has shape (1, 16, 2, 2, 64); it should be (batch, seqlen, 3, heads, head_dim)",
        ),
        (lambda: flashladder.flash_attn_kvpacked_func(q[None], packing[0]), "kv has shape (16, 2, 2, 64); it should"),
        (lambda: packed_attention(q[None], q, q, *sequences), "q has shape (1, 16, 2, 64); packed, it is (total, h"),
        (lambda: packed_attention(q, q, q[:8], *sequences), "v is (8, 2, 64) torch.bfloat16; with the other"),
    ):
        with pytest.raises(UnsupportedProblemError, match=re.escape(words)):
            call()


@pytest.mark.parametrize(
    ("function", "argument", "value", "words"),
    [
        ("packed_attention", "q", None, "q=None is of type NoneType; it should be a torch.Tensor"),
        ("packed_attention", "cu_seqlens_q", [0, 16], "cu_seqlens_q is of type list; it should be a torch.Tensor"),
        ("packed_attention", "cu_seqlens_k", "x", "cu_seqlens_k='x' is of type str; it should be a torch.Tensor"),
        ("packed_attention", "max_seqlen_q", "16", "max_seqlen_q='16' is of type str; it should be a whole number"),
        ("packed_attention", "max_seqlen_q", 16.0, "max_seqlen_q=16.0 is of type float; it should be a whole number"),
        ("packed_attention", "max_seqlen_k", torch.tensor(2.5), "max_seqlen_k is of type torch.Tensor; it should be a"),
        ("packed_attention", "max_seqlen_k", True, "max_seqlen_k=True is of type bool; it should be a whole number"),
        ("packed_attention", "max_seqlen_k", -1, "max_seqlen_k=-1: must be at least 0"),
        ("packed_attention", "causal", None, "causal=None is of type NoneType; it should be True or False"),
        ("packed_attention", "softcap", "x", "softcap='x' is of type str; it should be a number"),
        ("packed_attention", "version", 24, 'version=24 is of type int; it should be text, such as "24"'),
        ("flash_attn_varlen_func", "max_seqlen_k", None, "max_seqlen_k=None is of type NoneType; it should be a whole"),
        ("flash_attn_varlen_func", "k", 3, "k=3 is of type int; it should be a torch.Tensor"),
        ("flash_attn_func", "k", "x", "k='x' is of type str; it should be a torch.Tensor"),
        ("flash_attn_func", "causal", "no", "causal='no' is of type str; it should be True or False"),
        ("flash_attn_func", "return_attn_probs", 1, "return_attn_probs=1 is of type int; it should be True or False"),
        ("flash_attn_func", "dropout_p", "x", "dropout_p='x' is of type str; it should be a number"),
        ("flash_attn_func", "softcap", None, "softcap=None is of type NoneType; it should be a number"),
        ("flash_attn_qkvpacked_func", "qkv", None, "qkv=None is of type NoneType; it should be a torch.Tensor"),
        ("flash_attn_kvpacked_func", "kv", "x", "kv='x' is of type str; it should be a torch.Tensor"),
        ("flash_attn_varlen_kvpacked_func", "kv", [], "kv is of type list; it should be a torch.Tensor"),
    ],
    ids=str,
)
def test_arguments_of_other_types_are_named(function, argument, value, words):
    q, ends = torch.zeros(16, 1, 64, dtype=torch.bfloat16), int32(0, 16)
    packing = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 16, "max_seqlen_k": 16}
    called = getattr(flashladder, function)
    given = {name: q for name in inspect.signature(called).parameters if name in ("q", "k", "v", "kv", "qkv")}
    if "packed_attention" in function or "varlen" in function:
        given |= packing
    with pytest.raises(UnsupportedProblemError, match=re.escape(words)):
        called(**given | {argument: value})


@pytest.mark.parametrize("longest", [2**31 - 1, 2**31, 2**63, 2**70, torch.tensor(9), np.int64(9)], ids=repr)
def test_the_longest_may_be_beyond_every_sequence(longest, device):
    """C's int holds none of the large ones; a tensor and NumPy's integers are whole numbers too."""
    qkv, ends = drawn(3, 20, 1, 64, device=device), int32(0, 9, 14, device=device)
    expected = packed_attention(*qkv, ends, ends, 9, 9, causal=True)
    assert torch.equal(packed_attention(*qkv, ends, ends, longest, longest, causal=True), expected)
    found = flashladder.flash_attn_varlen_func(*qkv, ends, ends, longest, longest, window_size=(-1, 0))
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_a_captured_call_stays_within_its_tensors_whatever_max_seqlen_says():
    """Nothing can be read while a graph is captured: rows beyond a max_seqlen that is too small stay 0."""
    qkv, ends = drawn(3, 300, 2, 64, device="cuda"), int32(0, 300, device="cuda")
    expected = packed_attention(*qkv, ends, ends, 300, 300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        beyond = packed_attention(*qkv, ends, ends, 2**40, 2**40)
        short = packed_attention(*qkv, ends, ends, 1, 300)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(beyond, expected)
    assert torch.equal(short[:1], expected[:1])
    done = (short != 0).any(-1).any(-1)
    assert torch.equal(short[done], expected[done])


@pytest.mark.parametrize(
    ("cu_seqlens", "words"),
    [
        (torch.tensor([0, 8, 16]), "cu_seqlens_q is (3,) torch.int64; it should be (sequences + 1,) torch.int32"),
        (int32(0, 16).to("meta"), "cu_seqlens_q is on meta, q on cpu"),
        (int32(), "cu_seqlens_q is (0,) torch.int32; it should be (sequences + 1,)"),
        (int32(0), "cu_seqlens_q is of 0 sequences, cu_seqlens_k of 2"),
        (int32(0, 4, 8, 16), "cu_seqlens_q is of 3 sequences, cu_seqlens_k of 2"),
        (int32(1, 8, 16), "cu_seqlens_q begins with 1; it should begin with 0"),
        (int32(-4, 8, 16), "cu_seqlens_q begins with -4; it should begin with 0"),
        (int32(0, 12, 8), "cu_seqlens_q[2] is 8, after 12; each should be at least the one before"),
        (int32(0, 8, 17), "cu_seqlens_q ends with 17; q has 16 rows"),
        (int32(0, 2, 16), "max_seqlen_q is 12; sequence 1 of cu_seqlens_q has 14 rows"),
    ],
    ids=lambda value: str(value.tolist() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else ""),
)
def test_wrong_sequences_are_refused_before_anything_is_read(cu_seqlens, words, monkeypatch):
    monkeypatch.setattr(operator, "launch", lambda *arguments: pytest.fail("it ran"))
    q = torch.zeros(16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblemError, match=re.escape(words)):
        packed_attention(q, q, q, cu_seqlens, int32(0, 8, 16), 12, 12)
