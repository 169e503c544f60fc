"""Kernels that look faster than they are, each of a known kind: the lab says which, and gives them no figure.

The kinds are those that gpu-mode's kernel competitions met (gpu-mode/pygpubench), and karpathy/llm.c's pull request
851 describes.
"""

import contextlib
import re
import sys
import threading
import time

import pytest
import torch

from flashladder.common.errors import CheatError, VerificationError
from flashladder.common.measure import contest, spot
from flashladder.common.measure.baselines.forward import ON_CPU
from flashladder.common.measure.timing import TimingSettings
from flashladder.common.problem.check import Check
from flashladder.common.problem.operations.forward import attention
from flashladder.common.problem.problem import Problem

PROBLEM = Problem(num_heads=2, seqlen_q=192, head_dim=64)
RIGHT = Check(0.0, 1.0, 0.0, 1.0, faults=())


def honest(problem, tensors):
    def launch():
        o, lse = attention(problem, tensors.by_name, torch.float32)
        tensors.o.copy_(o)
        tensors.lse.copy_(lse)

    return launch


def reads_what_the_outputs_hold(problem, tensors):
    compute = honest(problem, tensors)

    def launch():
        if tensors.o[0, 0, 0, 0].isnan():
            compute()

    return launch


def remembers_the_inputs(problem, tensors):
    compute, known, answers = honest(problem, tensors), [], []

    def launch():
        sample = tensors.v[0, :4, 0].clone()
        if known and torch.equal(known[0], sample):
            for tensor, answer in zip((tensors.o, tensors.lse), answers, strict=True):
                tensor.copy_(answer)
            return
        compute()
        known[:], answers[:] = [sample], [tensors.o.clone(), tensors.lse.clone()]

    return launch


def gives_an_earlier_answer(problem, tensors):
    compute, answers = honest(problem, tensors), []

    def launch():
        if not answers:
            compute()
            answers.extend((tensors.o.clone(), tensors.lse.clone()))
        tensors.o.copy_(answers[0])
        tensors.lse.copy_(answers[1])

    return launch


def stops_after_some_calls(problem, tensors):
    """Checks, before which the outputs are poisoned, do not count: it stops amid the timed calls, however many."""
    compute, calls = honest(problem, tensors), []

    def launch():
        if not tensors.o[0, 0, 0, 0].isnan():
            calls.append(1)
        if len(calls) < 4:
            compute()

    return launch


def skips_every_other_call(problem, tensors):
    """Those with odd numbers, unless the outputs are poisoned. Spot checks once timed those with even ones."""
    compute, calls = honest(problem, tensors), []

    def launch():
        calls.append(1)
        if tensors.o[0, 0, 0, 0].isnan() or len(calls) % 2 == 0:
            compute()

    return launch


def is_checked():
    frames, frame = [], sys._getframe()
    while frame:
        frames.append(frame.f_code.co_name)
        frame = frame.f_back
    return "check" in frames


def computes_where_it_is_checked(problem, tensors):
    compute = honest(problem, tensors)
    return lambda: compute() if is_checked() else None


def leaves_work_to_another_thread(problem, tensors):
    compute, pending = honest(problem, tensors), []

    def launch():
        if is_checked():
            for thread in pending:
                thread.join()
            compute()
        else:
            pending.append(threading.Thread(target=lambda: (time.sleep(0.002), compute())))
            pending[-1].start()

    return launch


def computes_before_it_is_timed(problem, tensors):
    """All of it, when it is prepared."""
    honest(problem, tensors)()
    answers = [tensors.o.clone(), tensors.lse.clone()]

    def launch():
        tensors.o.copy_(answers[0])
        tensors.lse.copy_(answers[1])

    return launch


def slows_the_clock(problem, tensors):
    compute, clock = honest(problem, tensors), time.perf_counter

    def launch():
        compute()
        time.perf_counter = lambda: clock() / 2

    return launch


def slows_the_clock_before(problem, tensors):
    clock = time.perf_counter
    time.perf_counter = lambda: clock() / 2
    return honest(problem, tensors)


def takes_no_maximum(problem, tensors):
    """P = exp(S) in fp16: right for normal scores, which are small."""

    def launch():
        q, k, v = (tensor.transpose(1, 2).float() for tensor in (tensors.q, tensors.k, tensors.v))
        p = (problem.softmax_scale * q @ k.mT).exp()
        tensors.o.copy_((p.half().float() @ v / p.sum(-1, keepdim=True)).transpose(1, 2))
        tensors.lse.copy_(p.sum(-1).log())

    return launch


@pytest.fixture
def hold(monkeypatch):
    """A contest on the CPU, whose kernels are functions as above."""
    monkeypatch.setattr(contest, "on_gpu", lambda kernel, problem, tensors: kernel(problem, tensors))

    def call(kernel, rounds=4, problem=PROBLEM):
        return contest.hold(problem, {"ours": kernel}, [ON_CPU["math"]], TimingSettings(rounds=rounds), "cpu")

    return call


def test_an_honest_kernel_is_timed(hold):
    result = hold(honest)
    assert result.measurement is not None, result.remarks
    assert result.measurement.time_us("ours") > 0


SKIPS = "takes .* us for inputs that it has seen, and .* us for new ones: it does not compute in every timed call"
LATE = "had not written its output when the clock of a timed call stopped"
STALE = "gave the answer of an earlier call to new inputs"
CLOCK = "replaced time.perf_counter, by which it is timed"


@pytest.mark.parametrize(
    ("cheat", "words"),
    [
        (reads_what_the_outputs_hold, SKIPS),
        (remembers_the_inputs, SKIPS),
        (gives_an_earlier_answer, STALE),
        (stops_after_some_calls, LATE),
        (skips_every_other_call, SKIPS),
        (computes_where_it_is_checked, LATE),
        (leaves_work_to_another_thread, f"({LATE}|{STALE}|is wrong in a timed call)"),
        (computes_before_it_is_timed, STALE),
        (slows_the_clock, CLOCK),
        (slows_the_clock_before, CLOCK),
    ],
)
def test_a_cheat_is_named(hold, cheat, words):
    clock = time.perf_counter
    with pytest.raises(CheatError, match=f"ours {words}"):
        hold(cheat)
    assert time.perf_counter is clock


def test_precision_that_normal_inputs_do_not_ask_for_is_missed_on_others(hold):
    result = hold(takes_no_maximum)
    assert result.measurement is None
    assert result.remarks[0].startswith("ours is wrong, and not timed")
    assert re.search(r"error inf, tolerance .*, with other inputs: .*family=sinks", result.remarks[0])
    assert contest.hold(PROBLEM, {"ours": takes_no_maximum}, [], None, "cpu").checks["ours"].passed


def changed(change):
    """A kernel with changed weights: change(exponentials, scores), keys last."""

    def kernel(problem, tensors):
        def launch():
            q, k, v = (tensor.transpose(1, 2).float() for tensor in (tensors.q, tensors.k, tensors.v))
            scores = problem.softmax_scale * q @ k.mT
            highest = scores.amax(-1, keepdim=True)
            sums = (scores - highest).exp().sum(-1, keepdim=True)
            p = change((scores - highest).exp(), scores)
            tensors.o.copy_((p @ v / p.sum(-1, keepdim=True)).transpose(1, 2))
            tensors.lse.copy_((highest + sums.log())[..., 0])

        return launch

    return kernel


@pytest.mark.parametrize(
    ("change", "found_by"),
    [
        (lambda p, s: torch.where(p < 2**-12, 0, p), "family=sinks"),
        (lambda p, s: p.masked_fill(s < s.topk(950).values[..., -1:], 0), "softmax_scale=0.0078125"),
        (lambda p, s: (s - s[..., -64:].amax(-1, keepdim=True)).exp(), "family=falling_steeply"),
        (lambda p, s: (s - s[..., :64].amax(-1, keepdim=True)).exp(), "family=rising_steeply"),
        (lambda p, s: p.to(torch.float8_e4m3fn).float(), "family=maximum_in_turn"),
    ],
    ids=["small weights left out", "some keys left out", "last maximum", "first maximum", "coarse weights"],
)
def test_what_hard_inputs_are_for(hold, change, found_by):
    """Only O is wrong, and with normal inputs within the tolerance."""
    faults = hold(changed(change), problem=Problem(seqlen_q=192, seqlen_k=1024, head_dim=64)).checks["ours"].faults
    assert any(found_by in fault for fault in faults), faults
    assert all("with other inputs" in fault for fault in faults), faults


def test_an_operation_without_hard_families_has_flat_inputs_alone(monkeypatch):
    assert [task.family for task in contest.hard_problems(PROBLEM)] == ["normal", *contest.HARD]
    monkeypatch.setattr(type(PROBLEM.asked), "families", ("normal",))
    (flat,) = contest.hard_problems(PROBLEM)
    assert (flat.batch, flat.family, flat.softmax_scale) == (1, "normal", 1 / 128)


def test_hard_inputs_of_a_cache_take_the_memory_of_one_sequence():
    sizes = {"num_heads": 16, "num_heads_k": 1, "seqlen_q": 1, "head_dim": 576, "head_dim_v": 512}
    task = Problem(operation="mla", seqlens_k=(3, 70, 5), options={"num_pages": 5000}, **sizes)
    hard = contest.hard_problems(task)
    assert [each.family for each in hard] == ["normal", *contest.HARD]
    assert {(each.batch, each.seqlens_k, each.num_pages) for each in hard} == {(1, (70,), 0)}


def test_new_inputs_have_the_answer_that_is_expected(hold):
    """Also in groups, under a mask and in other layouts: signs of columns change, scores do not."""
    for options in ({"causal": True, "num_heads_k": 1}, {"layout": "padded"}, {"layout": "qkv", "dtype": "fp16"}):
        instance = contest.ProblemInstance(Problem(num_heads=2, seqlen_q=40, head_dim=64, **options), "cpu")
        compute, stage = honest(instance.problem, instance.tensors), instance.stage
        before = {name: getattr(instance.tensors, name).clone() for name in "qkv"}
        for _ in range(3):
            stage.draw()
            stage.new()
            assert all(not torch.equal(getattr(instance.tensors, name), tensor) for name, tensor in before.items())
            compute()
            stage.keep()
            assert stage.fault() is None
        stage.seen()
        assert all(torch.equal(getattr(instance.tensors, name), tensor) for name, tensor in before.items())


IN_BYTES = {"operation": "mla", "head_dim": 576, "head_dim_v": 512, "fp8_rows": True}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "sizes", [{"operation": "decode", "num_heads_k": 1}, {"operation": "mla", "head_dim_v": 32}, IN_BYTES]
)
def test_new_caches_have_the_answer_that_is_expected(sizes, paged):
    """Also where one tensor is both caches."""
    options = {"paged": paged, "page_size": 64 if sizes is IN_BYTES else 16}
    options |= {name: sizes[name] for name in ("fp8_rows",) if name in sizes}
    sizes = {"num_heads": 2, "seqlen_q": 1, "head_dim": 64, "seqlens_k": (70, 9), "num_heads_k": 1} | sizes
    problem = Problem(options=options, **{name: size for name, size in sizes.items() if name not in options})
    instance = contest.ProblemInstance(problem, "cpu")
    tensors, stage = instance.tensors, instance.stage
    seen = tensors.k_cache.clone()
    stage.draw()
    stage.new()
    assert not torch.equal(tensors.k_cache.nan_to_num(), seen.nan_to_num())
    for name, exact in problem.asked.compute(problem, tensors.by_name, torch.float64).items():
        tensors.by_name[name].copy_(exact)
    stage.keep()
    assert stage.fault() is None


def test_signs_of_8_bit_floats_are_flipped():
    numbers, signs = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([-1, 1], dtype=torch.int8)
    before = numbers.to(torch.float8_e4m3fn)
    spot._flip(before, signs, out := torch.empty_like(before))
    assert torch.equal(out.float(), numbers * signs)


def test_a_write_outside_in_a_timed_call_is_found():
    instance = contest.ProblemInstance(PROBLEM, "cpu")
    stage = instance.stage
    stage.draw()
    stage.new()
    honest(PROBLEM, instance.tensors)()
    stage.keep()
    instance.tensors.o.as_strided((1,), (1,), instance.tensors.o.storage_offset() - 1).fill_(0)
    assert "overwritten" in stage.fault()


def test_spot_checks_come_at_any_time(monkeypatch):
    """Eight a contender, at rounds that it cannot know, and of a slow one two."""
    instance = contest.ProblemInstance(PROBLEM, "cpu")

    class Timer:
        def __init__(self, us):
            self.us = us
            self.at = []

        def once(self, launch, before, after):
            before()
            launch()
            after()
            return self.us

    for us, count in ((10.0, spot.COUNT), (2 * spot.SLOW_US, spot.COUNT_OF_SLOW)):
        places = set()
        for seed in range(3):
            timer, taken = Timer(us), []
            checks = spot.SpotChecks("ours", honest(PROBLEM, instance.tensors), instance.stage, seed)
            with contextlib.suppress(VerificationError):
                for number in range(20):
                    before = len(checks._new_us)
                    checks.now_and_then(timer)
                    taken += [number] * (len(checks._new_us) - before)
            checks.finish(timer)
            assert len(checks._new_us) == len(checks._seen_us) == count
            places.add(tuple(taken))
        assert len(places) > 1
