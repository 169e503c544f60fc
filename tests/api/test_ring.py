"""Ring attention: the parts of the zigzag are the causal mask, each once and in equal shares; ranks give the whole."""

import queue
import re
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from flashladder import ring_attention, zigzag_join, zigzag_split
from flashladder.common import console
from flashladder.common.api import ring
from flashladder.common.api.options import Options
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.paths import ROOT
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.operations import forward
from flashladder.common.problem.problem import Problem
from flashladder.common.studies import ring_trial
from flashladder.tools.commands import ring as command


@given(world_size=st.integers(1, 6), length=st.integers(1, 3))
def test_each_step_takes_an_equal_share_of_the_mask(world_size, length):
    seqlen = 2 * length
    positions = [zigzag_split(torch.arange(world_size * seqlen), rank, world_size, 0) for rank in range(world_size)]
    seen = torch.zeros(world_size * seqlen, world_size * seqlen, dtype=torch.int)
    for rank in range(world_size):
        for source in range(world_size):
            rows, keys, masked = ring._seen(rank, source, seqlen, True)
            pairs = torch.ones(seqlen, seqlen, dtype=torch.int).tril()[rows, keys]
            if not masked:
                pairs = torch.ones_like(pairs)
            assert pairs.sum() == (seqlen * (seqlen + 1) // 2 if source == rank else seqlen * seqlen // 2)
            seen[positions[rank][rows, None], positions[source][keys]] += pairs
    assert torch.equal(seen, torch.ones_like(seen).tril())
    assert torch.equal(zigzag_join(positions, 0), torch.arange(world_size * seqlen))


def exactly(q, k, v, *, causal, softmax_scale, return_lse, version):
    """What a kernel would give, by the textbook."""
    batch, seqlen_q, heads, head_dim = q.shape
    sizes = {"batch": batch, "num_heads": heads, "num_heads_k": k.shape[2], "seqlen_q": seqlen_q, "head_dim": head_dim}
    problem = Problem(**sizes, seqlen_k=k.shape[1], causal=causal, softmax_scale=softmax_scale)
    o, lse = forward.attention(problem, {"q": q, "k": k, "v": v}, torch.float32)
    return o.to(q.dtype), lse


def gradients_exactly(dout, q, k, v, o, lse, dlse, *options):
    """What a backward rung would give of the keys that it is given, by the textbook, under a log-sum-exp of more."""
    *options, _, _, _ = options  # of which gradients are wanted
    causal, scale = Options(*options).causal, Options(*options).softmax_scale
    groups = q.shape[2] // k.shape[2]
    q, dout, o = (x.double().transpose(1, 2) for x in (q, dout, o))
    k, v = (x.double().transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))
    scores = scale * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    P = (scores - lse[..., None]).exp()
    dS = P * (dout @ v.mT - (dout * o).sum(-1, keepdim=True) + (0 if dlse is None else dlse[..., None]))
    of_keys = ((scale * dS.mT @ q).unflatten(1, (-1, groups)).sum(2), (P.mT @ dout).unflatten(1, (-1, groups)).sum(2))
    return tuple(x.transpose(1, 2).bfloat16() for x in (scale * dS @ k, *of_keys))


@pytest.fixture
def as_ranks(monkeypatch):
    """Calls a function as each of some ranks, in threads that hand tensors on as a process group does."""
    here = threading.local()

    def call(world_size, function):
        doors = [queue.Queue() for _ in range(world_size)]
        results = [None] * world_size

        def exchange(tensors, coming, group, rank, ranks):
            doors[(rank + 1) % ranks].put(tensors.clone())
            return [SimpleNamespace(wait=lambda: coming.copy_(doors[rank].get(timeout=60)))]

        def one(rank):
            here.rank = rank
            results[rank] = function(rank)

        monkeypatch.setattr(ring, "pass_on", exchange)
        monkeypatch.setattr(ring, "attention", exactly)
        monkeypatch.setattr(ring, "_gradients", gradients_exactly)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda group: here.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group: world_size)
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return call


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_parts_make_the_whole(world_size, causal, as_ranks):
    problem = Problem(batch=2, num_heads=4, num_heads_k=2, seqlen_q=24, head_dim=16, causal=causal, softmax_scale=0.4)
    tensors = make_inputs(problem)
    expected = expect(problem, tensors)

    def part(rank):
        parts = (zigzag_split(tensor, rank, world_size) for tensor in (tensors.q, tensors.k, tensors.v))
        return ring_attention(*parts, causal=causal, softmax_scale=0.4, return_lse=True)

    outputs, sums = zip(*as_ranks(world_size, part), strict=True)
    o, lse = zigzag_join(outputs), zigzag_join(sums, 2)
    assert o.dtype == torch.bfloat16
    assert (o - expected.exact["o"]).abs().max() <= expected.tolerances["o"]
    torch.testing.assert_close(lse.double(), expected.exact["lse"].double(), rtol=0, atol=expected.tolerances["lse"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_the_parts_make_those_of_the_whole(world_size, causal, as_ranks):
    sizes = {"batch": 2, "num_heads": 4, "num_heads_k": 2, "seqlen_q": 24, "head_dim": 64, "softmax_scale": 0.4}
    problem = Problem(**sizes, causal=causal, operation="backward", options={"dlse": True})
    tensors = make_inputs(problem)
    expected = expect(problem, tensors)

    def part(rank):
        q, k, v, dout = (zigzag_split(tensors.by_name[name], rank, world_size) for name in ("q", "k", "v", "dout"))
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        outputs = ring_attention(*inputs, causal=causal, softmax_scale=0.4, return_lse=True)
        dlse = zigzag_split(tensors.by_name["dlse"], rank, world_size, dim=2)
        return torch.autograd.grad(outputs, inputs, (dout, dlse))

    of_ranks = as_ranks(world_size, part)
    for name, parts in zip(("dq", "dk", "dv"), zip(*of_ranks, strict=True), strict=True):
        assert parts[0].dtype == torch.bfloat16
        assert (zigzag_join(parts) - expected.exact[name]).abs().max() <= expected.tolerances[name]


def test_the_lines_of_the_docs_give_a_part(as_ranks):
    text = (ROOT / "docs" / "models.md").read_text()
    lines = textwrap.dedent(
        re.search(r"^    from flashladder import ring_attention.*?\n\n(?=\S)", text, re.M | re.S)[0]
    )
    problem = Problem(num_heads=2, seqlen_q=16, head_dim=16, causal=True)
    tensors = make_inputs(problem)

    def part(rank):
        names = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "rank": rank, "world_size": 2}
        exec(lines, names)
        return names["o"]

    expected = expect(problem, tensors)
    assert (zigzag_join(as_ranks(2, part)) - expected.exact["o"]).abs().max() <= expected.tolerances["o"]


def test_without_a_mask_queries_and_keys_may_be_of_other_lengths(as_ranks):
    problem = Problem(num_heads=2, seqlen_q=9, seqlen_k=30, head_dim=16)
    tensors = make_inputs(problem)

    def part(rank):
        q, k, v = (tensor.chunk(3, 1)[rank] for tensor in (tensors.q, tensors.k, tensors.v))
        return ring_attention(q, k, v, softmax_scale=problem.softmax_scale)

    expected = expect(problem, tensors)
    assert (torch.cat(as_ranks(3, part), 1) - expected.exact["o"]).abs().max() <= expected.tolerances["o"]


def test_what_is_no_part_is_refused(monkeypatch):
    q = torch.zeros(1, 6, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblemError, match=r"call torch\.distributed\.init_process_group first"):
        ring_attention(q, q, q)
    with pytest.raises(UnsupportedProblemError, match="a sequence of 6 over 2 ranks; it should be a multiple of 4"):
        zigzag_split(q, 0, 2)
    for call, words in (
        (lambda: ring_attention("x", q, q), "q='x' is of type str; it should be a torch.Tensor"),
        (lambda: ring_attention(q, q, q, causal=1), "causal=1 is of type int; it should be True or False"),
        (lambda: zigzag_split([1, 2], 0, 1), "whole is of type list; it should be a torch.Tensor"),
        (lambda: zigzag_split(q, "0", 1), "rank='0' is of type str; it should be a whole number"),
        (lambda: zigzag_split(q, 0, None), "world_size=None is of type NoneType; it should be a whole number"),
        (lambda: zigzag_split(q, 0, 1, 4), "dim=4 of a tensor of shape (1, 6, 1, 64), which has no such one"),
        (lambda: zigzag_join(q), "parts should be a list of tensors, one of each rank"),
        (lambda: zigzag_join([]), "parts should be a list of tensors, one of each rank"),
        (lambda: zigzag_join([q, 3]), "parts[1]=3 is of type int; it should be a torch.Tensor"),
        (lambda: zigzag_join([q, q], -5), "dim=-5 of a tensor of shape (1, 6, 1, 64), which has no such one"),
        (lambda: zigzag_join([q, q[:, :4]]), "parts of the shapes (1, 4, 1, 64), (1, 6, 1, 64); they should be of one"),
        (lambda: zigzag_join([q[:, :3]] * 2), "parts of 3 rows; each is two chunks of one length"),
    ):
        with pytest.raises(UnsupportedProblemError, match=re.escape(words)):
            call()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    for arguments, words in (
        ((q[:, :5], q[:, :5], q[:, :5]), "parts of 5 queries and 5 keys: with causal=True they should be as many"),
        ((q, q[:, :4], q[:, :4]), "parts of 6 queries and 4 keys: with causal=True they should be as many"),
        ((q[0], q, q), r"q \(6, 1, 64\), .*: q should be \(batch, seqlen, heads, head_dim\), and k and v alike"),
        ((q, q, q[:, :4]), r"v \(1, 4, 1, 64\): q should be"),
    ):
        with pytest.raises(UnsupportedProblemError, match=words):
            ring_attention(*arguments, causal=True)


def test_the_command_says_how_little_it_takes_without_gpus(monkeypatch, capsys):
    trial = ring_trial.RingTrial({"o": 0.001}, {"o": 0.01}, {})
    monkeypatch.setattr(ring_trial, "hold", lambda *_: trial)
    assert console.run(command.main, command.parser(), ["--device", "emulator"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said == "note: no GPU: 64 tokens (--seqlen), on the emulator; the answer is checked, and not timed"
