"""A training step in C++ launches what it launches in Python; what it knows of a problem is of no other one."""

from functools import partial

import pytest
import torch

from flashladder.common.api import attention, backward
from flashladder.common.api.options import Options
from flashladder.common.api.packed import packed_attention
from flashladder.common.runtime import fast_path
from flashladder.tests.support.training_calls import (
    QKV,
    asked_of,
    for_training,
    in_python,
    launches_of,
    packed_step,
    qkv,
    step,
)


@pytest.fixture(params=["node", "function"])
def driver(monkeypatch, request):
    return for_training(monkeypatch, request.param == "node")


@pytest.fixture
def asked(monkeypatch):
    return asked_of(monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("of_lse", [False, True])
def test_what_is_known_is_not_asked_again(driver, asked, head_dim, of_lse):
    run = partial(step, qkv(head_dim=head_dim), of_lse=of_lse, causal=True, softmax_scale=1)
    for _ in range(2):
        run()
    asked.clear()
    o, lse, *gradients = run()
    assert not asked
    assert [x.shape for x in (o, lse, *gradients)] == [o.shape, (2, 4, 64), *[o.shape] * 3]
    assert o.requires_grad
    assert lse.requires_grad


def test_the_backward_pass_of_options_is_not_asked_for_again(driver, asked):
    for _ in range(2):
        step(window=(9, 0), dropout_p=0.1, alibi_slopes=torch.zeros(4))
    o = attention(*QKV, window=(9, 0), dropout_p=0.1, alibi_slopes=torch.zeros(4))
    asked.clear()
    torch.autograd.grad(o, QKV, torch.zeros_like(o))
    assert not asked


@pytest.mark.parametrize(
    ("packed", "options"),
    [(False, {"alibi_slopes": torch.zeros(4)}), (False, {"window": (9, 0)}), (True, {"softcap": 1.5}), (True, {})],
    ids=str,
)
def test_the_forward_pass_of_options_is_not_asked_for_again(driver, monkeypatch, packed, options):
    starts = torch.tensor([0, 5, 64], dtype=torch.int32)
    q = QKV[0].detach()

    def run():
        return (
            packed_attention(*[q[0]] * 3, starts, starts, 59, 59, **options)
            if packed
            else attention(q, q, q, **options)
        )

    shapes = [run().shape for _ in range(3)]
    monkeypatch.setattr(Options, "forward_problem", None)
    assert run().shape == shapes[0]


OTHERS = {
    "causal": partial(step, causal=True),
    "scale": partial(step, softmax_scale=3.0),
    "same bits": partial(step, deterministic=True),
    "window": partial(step, window=(5, 0)),
    "another window": partial(step, window=(6, 0)),
    "dropout": partial(step, dropout_p=0.5),
    "another dropout": partial(step, dropout_p=0.25),
    "dtype": partial(step, qkv(dtype=torch.float16)),
    "groups": partial(step, qkv(heads_k=2)),
    "rows": partial(step, qkv(rows=65)),
    "keys": partial(step, qkv(keys=70)),
    "batch": partial(step, qkv(batch=3)),
    "padded": partial(step, qkv(head_dim=56)),
    "strides": partial(step, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in QKV]),
    "dQ alone": partial(step, [QKV[0], *(x.detach() for x in QKV[1:])], QKV[0]),
    "dK and dV": partial(step, [QKV[0].detach(), *QKV[1:]], QKV[1:]),
    "dLSE": partial(step, of_lse=True),
    "packed": partial(packed_step, (5, 0, 59)),
    "more sequences": partial(packed_step, (5, 1, 1, 57)),
    "a longer one": partial(packed_step, (3, 1, 60)),
    "packed, a window": partial(packed_step, (5, 0, 59), window=(5, 0)),
    "packed, wide": partial(packed_step, (5, 0, 59), qkv(1, head_dim=256)),
}


@pytest.mark.slow
def test_each_launches_its_own(driver, monkeypatch):
    """In turns, each beside all others, at its first call and when it is known."""
    expected = {name: in_python(monkeypatch, partial(launches_of, driver, run)) for name, run in OTHERS.items()}
    for _ in range(4):
        for name, run in OTHERS.items():
            assert launches_of(driver, run) == expected[name], name
    assert len(backward.planned) == len(OTHERS)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_gpu_gives_the_same_bits_as_in_python(monkeypatch, head_dim, packed):
    """Also on a stream of its own, where the backward pass follows the forward pass, and when lengths come in turns."""
    fast_path.load()
    assert fast_path.extension, fast_path.missing
    expected, given = {}, {}
    for rows in (200, 512):
        drawn = [torch.randn(2, rows, 4, head_dim, device="cuda").bfloat16() for _ in range(4)]
        given[rows] = [x.requires_grad_() for x in drawn[:3]], drawn[3]

    def bits_of(rows):
        inputs, dout = given[rows]
        asked = {"causal": True, "deterministic": True, "return_lse": True}
        if packed:
            starts = torch.tensor([0, 77, rows], dtype=torch.int32, device="cuda")
            o, lse = packed_attention(*(x[0] for x in inputs), starts, starts, rows, rows, **asked)
            return o, lse, *torch.autograd.grad(o, inputs, dout[0])
        o, lse = attention(*inputs, **asked)
        return o, lse, *torch.autograd.grad(o, inputs, dout)

    for rows in given:
        expected[rows] = in_python(monkeypatch, partial(bits_of, rows))
    torch.cuda.synchronize()
    known = len(backward.planned)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for rows in (200, 512) * 4:
                assert all(map(torch.equal, bits_of(rows), expected[rows]))
    assert len(backward.planned) == known + 2
