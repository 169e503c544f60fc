"""Dropout: the mask and its statistics, and attention with it, forward and backward."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashladder
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
    """Of any two scores that are near, in a row, a column, another head or another square of 32, a quarter are both
    dropped."""
    dropped = ~dropout.kept(STATE, 0.5, range(4), range(192), 192)
    for shift in ((0, 0, 1), (0, 1, 0), (0, 8, 0), (0, 0, 8), (0, 0, 32), (0, 32, 0), (1, 0, 0), (2, 0, 0), (0, 5, -5)):
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


def test_p_is_a_number_of_256ths():
    assert [dropout.dropped(p) for p in (0.0, 1e-9, 0.1, 0.5, 0.9999)] == [0, 1, 26, 128, 255]
    assert dropout.rescale(0.1) == 256 / 230


# attention


@pytest.mark.parametrize(("causal", "dropout_p"), [(False, 0.3), (True, 0.97)])
def test_o_and_gradients_are_those_of_the_mask_by_hand(causal, dropout_p, device):
    inputs, dout = drawn(device)
    o, lse = attend(inputs, causal=causal, dropout_p=dropout_p, return_lse=True)
    gradients = torch.autograd.grad(o, inputs, dout)
    torch.manual_seed(0)
    mask = flashladder.dropout_mask(*inputs[:2], dropout_p)
    q, k, v = exact = [each.detach().double().requires_grad_() for each in inputs]
    k, v = (each.repeat_interleave(2, 2) for each in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8
    if causal:
        scores = scores.masked_fill(torch.ones_like(mask).tril(16).logical_not(), -torch.inf)
    kept = scores.softmax(-1) * mask * dropout.rescale(dropout_p)
    by_hand = torch.einsum("bhij,bjhd->bihd", kept, v)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        (o, *gradients), (by_hand, *torch.autograd.grad(by_hand, exact, dout.double())), strict=True
    ):
        assert (ours - theirs).abs().max() < 0.012 * theirs.abs().max()


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
    given = *(each.detach() for each in inputs), STATE.to(device), False, None, 0.3, "fastest"
    torch.library.opcheck(torch.ops.flashladder.attention_dropout.default, given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_p": 1.0}, "dropout_p=1.0: must be at least 0 and less than 1"),
        ({"dropout_p": -0.1}, "dropout_p=-0.1: must be at least 0 and less than 1"),
        ({"dropout_p": float("nan")}, "dropout_p=nan: must be"),
        ({"dropout_p": "x"}, "dropout_p='x' is of type str; it should be a number"),
        ({"window": (3, None), "softcap": 2.0}, "dropout_p=0.3 with window, softcap"),
        ({"version": "23"}, "23_general has no dropout"),
    ],
)
def test_what_is_refused(options, words):
    inputs, _ = drawn("cpu")
    with pytest.raises(UnsupportedProblemError, match=words):
        attend(inputs, **options)
