"""Dropout: the mask and its statistics, and attention with it, forward and backward."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashladder
from flashladder.common.api.operator import attention_general
from flashladder.common.api.options import Options
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem import dropout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STATE = torch.tensor([1, -2, 3], dtype=torch.int32)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def drawn(device, seqlen_q=20, seqlen_k=36, heads=2, heads_k=1, batch=2):
    generator = torch.Generator().manual_seed(1)
    shapes = (seqlen_q, heads), (seqlen_k, heads_k), (seqlen_k, heads_k)
    made = [torch.randn(batch, rows, count, 64, generator=generator).bfloat16().to(device) for rows, count in shapes]
    return [each.requires_grad_() for each in made], torch.randn_like(made[0])


def attend(inputs, seed=0, **options):
    torch.manual_seed(seed)
    return flashladder.attention(*inputs, **{"dropout_p": 0.3} | options)


# The mask


def test_philox_is_the_published_one():
    """The known answers of Random123 for a counter and a key of zeros, of 7 and of 10 rounds."""
    zeros = (np.zeros(1, np.uint32),) * 4
    of_seven, of_ten = ([int(word[0]) for word in dropout.philox(zeros, (0, 0), rounds)] for rounds in (7, 10))
    assert of_seven == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert of_ten == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("dropout_p", [0.004, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_p_says(dropout_p):
    mask = dropout.kept(STATE, dropout_p, range(4), range(256), 256)
    p = dropout.quantised(dropout_p)
    assert abs((~mask).double().mean() - p) < 5 * (p * (1 - p) / mask.numel()) ** 0.5


def test_neighbours_are_independent():
    """Of any two scores that are near, in a row, a column, another head or another square of 16, a quarter are both
    dropped."""
    dropped = ~dropout.kept(STATE, 0.5, range(4), range(192), 192)
    for shift in ((0, 0, 1), (0, 1, 0), (0, 8, 0), (0, 0, 8), (0, 0, 16), (0, 16, 0), (1, 0, 0), (2, 0, 0), (0, 5, -5)):
        both = dropped & dropped.roll(shift, (0, 1, 2))
        assert abs(both.double().mean() - 0.25) < 5 * (0.25 * 0.75 / both.numel()) ** 0.5, shift


def test_each_word_of_the_state_makes_another_mask():
    """As different as two of one p are: equal in half of all places."""
    masks = [dropout.kept(STATE + step, 0.5, range(1), range(128), 128) for step in torch.eye(3, dtype=torch.int32)]
    masks.append(dropout.kept(STATE, 0.5, range(1), range(128), 128))
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert abs((mask == other).double().mean() - 0.5) < 5 * 0.5 / 128


def test_a_part_of_the_mask_is_that_of_the_whole():
    whole = dropout.kept(STATE, 0.3, range(6), range(100), 70)
    assert torch.equal(dropout.kept(STATE, 0.3, range(2, 5), range(37, 90), 70), whole[2:5, 37:90])
    assert torch.equal(dropout.kept(STATE, 0.3, range(6), range(100), 33), whole[..., :33])


def test_a_mask_is_of_tensors_of_four_dimensions():
    q = torch.empty(5, 2, 64)
    with pytest.raises(UnsupportedProblemError, match=r"k has shape \(5, 2, 64\); it should be \(batch, seqlen,"):
        flashladder.dropout_mask(q[None], q, 0.3)


def test_p_is_a_number_of_256ths():
    assert [dropout.dropped(p) for p in (0.0, 1e-9, 0.1, 0.5, 0.9999)] == [0, 1, 26, 128, 255]
    assert dropout.rescale(0.1) == 256 / 230


# attention


def by_hand(q, k, v, mask, dropout_p, causal=False, window=None, softcap=0.0, slopes=None):
    """O and the log-sum-exp in fp64, of the weights that a mask keeps."""
    k, v = (each.repeat_interleave(2, 2) for each in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    ahead = ahead.to(q.device)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * ahead.abs()
    hidden = (ahead < 0) & causal
    if window is not None:
        hidden = hidden | (ahead > window[0])
    scores = scores.masked_fill(hidden, -torch.inf)
    kept = scores.softmax(-1) * mask * dropout.rescale(dropout_p)
    return torch.einsum("bhij,bjhd->bihd", kept, v), scores.logsumexp(-1)


def require_alike(ours, theirs):
    for given, exact in zip(ours, theirs, strict=True):
        assert (given - exact).abs().max() < 0.012 * exact.abs().max()


SLOPES = torch.tensor([0.3, 0.02])


@pytest.mark.parametrize(
    ("dropout_p", "options"),
    [
        (0.3, {}),
        (0.97, {"causal": True}),
        (0.3, {"causal": True, "window": (9, None)}),
        (0.3, {"softcap": 0.7, "slopes": SLOPES}),
        (0.1, {"causal": True, "window": (12, None), "softcap": 1.5, "slopes": SLOPES}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_o_and_gradients_are_those_of_the_mask_by_hand(dropout_p, options, device):
    inputs, dout = drawn(device)
    options = {name: x.to(device) if name == "slopes" else x for name, x in options.items()}
    asked = {"alibi_slopes" if name == "slopes" else name: x for name, x in options.items()}
    o, lse = attend(inputs, dropout_p=dropout_p, return_lse=True, **asked)
    gradients = torch.autograd.grad(o, inputs, dout)
    torch.manual_seed(0)
    mask = flashladder.dropout_mask(*inputs[:2], dropout_p)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    theirs, exact_lse = by_hand(*exact, mask, dropout_p, **options)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    require_alike((o, *gradients), (theirs, *torch.autograd.grad(theirs, exact, dout.double())))


@pytest.mark.slow
def test_the_log_sum_exps_gradient_beside_dropout(device):
    """It is that of all weights."""
    inputs, dout = drawn(device)
    o, lse = attend(inputs, softcap=0.7, return_lse=True)
    dlse = torch.linspace(-1, 1, lse.numel(), device=device).view_as(lse)
    made = torch.autograd.grad((o, lse), inputs, (dout, dlse))
    torch.manual_seed(0)
    mask = flashladder.dropout_mask(*inputs[:2], 0.3)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    outputs = by_hand(*exact, mask, 0.3, softcap=0.7)
    require_alike(made, torch.autograd.grad(outputs, exact, (dout.double(), dlse.double())))


@pytest.mark.parametrize(
    "options", [{}, {"window": (12, None), "softcap": 1.5, "slopes": SLOPES}], ids=["plain", "all"]
)
@pytest.mark.slow
def test_packed_sequences_are_those_of_the_mask_by_hand(options, device):
    """Each has its own part of the mask, that of a batch of the longest."""
    (q, k, v), dout = drawn(device, batch=1, seqlen_q=43, seqlen_k=60)
    inputs = [x[0].detach().requires_grad_() for x in (q, k, v)]
    ends_q, ends_k = ([0, 20, 20, 40, 43], [0, 36, 41, 41, 60])
    starts = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in (ends_q, ends_k)]
    options = {name: x.to(device) if name == "slopes" else x for name, x in options.items()}
    asked = {"softcap": options.get("softcap", 0.0), "alibi_slopes": options.get("slopes")}
    asked["window_size"] = (12, 0) if options else (-1, -1)
    torch.manual_seed(0)
    o = flashladder.flash_attn_varlen_func(*inputs, *starts, 20, 36, 0.3, causal=True, **asked)
    made = torch.autograd.grad(o, inputs, dout[0])
    torch.manual_seed(0)
    again = flashladder.packed_attention(
        *inputs,
        *starts,
        20,
        36,
        dropout_p=0.3,
        causal=True,
        alibi_slopes=asked["alibi_slopes"],
        softcap=asked["softcap"],
        window=(12, None) if options else (None, None),
    )
    assert torch.equal(o, again)
    torch.manual_seed(0)
    mask = flashladder.dropout_mask(q.new_empty(4, 20, 2, 64), q.new_empty(4, 36, 1, 64), 0.3)
    q, k, v = exact = [each.detach().double().requires_grad_() for each in inputs]
    parts = []
    for number in (0, 3):
        rows, keys = slice(*ends_q[number : number + 2]), slice(*ends_k[number : number + 2])
        part = mask[number, :, : rows.stop - rows.start, : keys.stop - keys.start]
        parts.append(by_hand(q[None, rows], k[None, keys], v[None, keys], part, 0.3, causal=True, **options)[0][0])
    expected = torch.cat((parts[0], torch.zeros_like(q[20:40]), parts[1]))  # the others see no key
    require_alike((o, *made), (expected, *torch.autograd.grad(expected, exact, dout[0].double())))


def test_packed_tensors_and_equal_lengths_are_a_batch(device):
    """The mask too, so that O is the same to the last bit."""
    together, _ = drawn(device, seqlen_k=20, heads=3, heads_k=3)
    qkv = torch.stack([x.detach() for x in together], 2)[..., :2, :].contiguous()
    starts = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)
    torch.manual_seed(0)
    batch = flashladder.flash_attn_qkvpacked_func(qkv, 0.3, causal=True)
    torch.manual_seed(0)
    packed = flashladder.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts, 20, 0.3, causal=True)
    assert torch.equal(batch.flatten(0, 1), packed)
    q, k, v = qkv.unbind(2)
    torch.manual_seed(0)
    assert torch.equal(batch, flashladder.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), 0.3, causal=True))


def test_sinks_and_an_odd_head_dim_and_out_beside_dropout(device):
    """What is done around a kernel is done around one that drops weights, too."""
    q, k, v = (x.detach() for x in drawn(device)[0])
    o, lse = attend((q, k, v), return_lse=True)
    sinks = torch.tensor([0.5, -1.0], device=device)
    share = torch.sigmoid(lse - sinks[:, None]).mT[..., None]
    torch.testing.assert_close(attend((q, k, v), sinks=sinks), (o * share).to(o.dtype))
    out = torch.empty_like(q)
    assert attend((q, k, v), out=out) is out
    assert torch.equal(out, o)
    narrow = attend([x[..., :60] for x in (q, k, v)])
    filled = [torch.nn.functional.pad(x[..., :60], (0, 4)) for x in (q, k, v)]
    assert torch.equal(narrow, attend(filled, softmax_scale=60**-0.5)[..., :60])


def test_without_dropout_the_bits_are_as_without_the_argument(device):
    inputs, _ = drawn(device)
    assert torch.equal(attend(inputs, dropout_p=0.0), flashladder.attention(*inputs))
    assert torch.equal(flashladder.flash_attn_func(*inputs, 0.0), flashladder.attention(*inputs))


def test_calls_differ_and_one_seed_repeats(device):
    inputs, _ = drawn(device)
    first, again = attend(inputs), attend(inputs)
    assert torch.equal(first, again)
    assert not torch.equal(first, flashladder.attention(*inputs, dropout_p=0.3))
    assert not torch.equal(first, attend(inputs, seed=1))
    torch.manual_seed(0)
    assert torch.equal(first, flashladder.flash_attn_func(*inputs, 0.3))
    with torch.no_grad():
        assert torch.equal(first, attend(inputs))


def test_under_activation_checkpointing_both_passes_have_one_mask(device):
    inputs, dout = drawn(device)
    expected = torch.autograd.grad(attend(inputs), inputs, dout)
    torch.manual_seed(0)
    o = checkpoint(lambda *x: flashladder.attention(*x, dropout_p=0.3), *inputs, use_reentrant=False)
    torch.rand(5, device=device)  # as other layers draw
    for ours, theirs in zip(torch.autograd.grad(o, inputs, dout), expected, strict=True):
        assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()  # dQ is summed in any order


def test_torch_compiles_both_passes(device):
    inputs, dout = drawn(device)

    def model(q, k, v):
        return flashladder.attention(q * 2, k, v, dropout_p=0.3) * 3

    torch.manual_seed(0)
    expected = model(*inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    o = compiled(*inputs)
    assert torch.equal(o, expected)
    ours, theirs = (torch.autograd.grad(each, inputs, dout) for each in (o, expected))
    assert all((a - b).abs().max() <= 2**-7 * b.abs().max() for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(compiled(*inputs), expected)


@pytest.mark.gpu
def test_each_replay_of_a_graph_draws_its_own_mask():
    inputs = [each.detach() for each in drawn("cuda")[0]]
    attend(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flashladder.attention(*inputs, dropout_p=0.3)
    graph.replay()
    first = o.clone()
    graph.replay()
    assert not torch.equal(first, o)


def test_its_operator_is_what_torch_expects(device):
    inputs, _ = drawn(device, seqlen_q=8, seqlen_k=8)
    options = Options(dropout_p=0.3, rng_state=STATE.to(device))
    torch.library.opcheck(attention_general, (*(each.detach() for each in inputs), *options.flat(), True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_p": 1.0}, "dropout_p=1.0: must be at least 0 and less than 1"),
        ({"dropout_p": -0.1}, "dropout_p=-0.1: must be at least 0 and less than 1"),
        ({"dropout_p": float("nan")}, "dropout_p=nan: must be"),
        ({"dropout_p": "x"}, "dropout_p='x' is of type str; it should be a number"),
        ({"dropout_p": None}, "dropout_p=None is of type NoneType; it should be a number"),
        ({"version": "23"}, "23_general has no dropout"),
    ],
)
def test_what_is_refused(options, words):
    inputs, _ = drawn("cpu")
    with pytest.raises(UnsupportedProblemError, match=words):
        attend(inputs, **options)
