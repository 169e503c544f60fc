"""Attacks the C++ way of a call, built as a library that is named; runtime/test_fast_path_attacked.py runs this.

Every function is called with wrong arguments, by threads, and while Python drops what it was lent; then references are
counted. It ends with "survived".
"""

import gc
import importlib.util
import math
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashladder import attention, flash_attn_with_kvcache
from flashladder.common.api import backward, differentiable, operator, step
from flashladder.common.runtime import fast_path
from flashladder.common.runtime.outputs import new_lse
from flashladder.common.runtime.plan import Plan
from flashladder.tests.support import fake_cuda

VERSION = "34"  # with a workspace and tensor maps
Q, K = (torch.zeros(2, rows, 4, 64).bfloat16() for rows in (64, 70))
WANTING = [x.clone().requires_grad_() for x in (Q, K)]
ROW, LENGTHS = Q[:, :1].contiguous(), torch.tensor([3, 4]).int()
OF_TORCH = ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_cuda_isCurrentStreamCapturing", "is_grad_enabled")
OF_GRADIENTS = ("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only")
TRAINED = "straight, trained"  # with gradients
BY_PLANS = ("straight", TRAINED, "remembered", "launched")
COUNTS = {"launch": 3, "straight": 12, "remembered": 5, "launched": 5, "said": 2}


class Sub(torch.Tensor):
    pass


class Evil:
    """What raises whatever it is asked for."""

    def _raise(self, *_):
        raise ValueError

    __float__ = __index__ = __hash__ = __eq__ = __bool__ = __len__ = __getattr__ = _raise


def nested(depth):
    found = 0
    for _ in range(depth):
        found = (found,)
    return found


def odd_tensors():
    shrunk = Q.clone()
    shrunk.untyped_storage().resize_(0)
    yield from (shrunk, Q.as_subclass(Sub), torch.nn.Parameter(Q), Q.clone().requires_grad_(), Q.to("meta"))
    yield from (Q.float().to_sparse(), torch.eye(4).to_sparse_csr(), torch.zeros(4, 4).to_mkldnn())
    yield torch.quantize_per_tensor(Q.float(), 0.1, 0, torch.quint8)
    yield from (torch.nested.nested_tensor([Q[0], Q[0, :9]], layout=kind) for kind in (torch.strided, torch.jagged))
    yield from (Q.to(torch.complex64).conj(), Q.float(), Q.double(), Q.bool(), Q.long(), Q.to(torch.float8_e4m3fn))
    yield from (torch.tensor(1.0), Q[0], Q[..., None], torch.zeros((1,) * 8), torch.zeros((1,) * 60), torch.Tensor())
    yield from (Q[..., ::2], Q.mT, Q[:, :0], Q.flatten()[1:], Q[:1])
    yield torch.empty(0).bfloat16().as_strided((0, 2**40, 2**40, 64), (2**62, 2**62, 2**62, 1))
    yield Q.as_strided((1, 64, 1, 64), (2**62, 64, 2**62, 1))


def odd():
    yield from (None, True, False, 0, -1, 2**63, 10**400, 0.5, math.nan, math.inf, -0.0, "x", b"34", np.float64(2))
    yield from ((), (None,), (1, 2, 3), [], set(), object(), Evil(), Evil, len, torch.Tensor, np.zeros(3))
    yield from (nested(5), nested(1_000_000), (0,) * 100_000, Plan(), memoryview(bytes(10)), SimpleNamespace(plan=5))
    yield from odd_tensors()


ODD = tuple(odd())
gc.freeze()  # later collections have less to go through


def function_of(name):
    return name.partition(",")[0]


def answer(name, *arguments):
    """Of a function; False for whatever says that it did nothing."""
    try:
        found = getattr(fast_path.extension, function_of(name))(*arguments)
    except TypeError:
        return False
    return False if found is None else found


def replaced(given, place, other):
    return *given[:place], other, *given[place + 1 :]


def attack_before_set_up(path):
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("fast_path", ExtensionFileLoader("fast_path", path))
    )
    module.__loader__.exec_module(module)
    for name, count in COUNTS.items():
        with pytest.raises(TypeError, match=f"{name} waits for set_up"):
            getattr(module, name)(*[None] * count)


def attack_set_up():
    """What is refused changes nothing."""
    right = getattr(torch.Tensor, fast_path.EXCHANGE), torch.Tensor, Plan, torch._C, {}, len, len, len, 5
    for place in (0, 1, 2, 3, 4, 8):
        for other in (None, 10**400, Evil(), Q, "x"):
            with pytest.raises((TypeError, ValueError, OverflowError)):
                fast_path.extension.set_up(*replaced(right, place, other))
    for given in ((), right[1:], (*right, 5)):
        with pytest.raises(TypeError):
            fast_path.extension.set_up(*given)


def attack_counts(calls):
    for name, given in calls.items():
        for count in {*range(14)} - {len(given)}:
            function = function_of(name)
            with pytest.raises(TypeError, match=f"{function} takes {len(given)} arguments, not {count}"):
                getattr(fast_path.extension, function)(*(given * 10)[:count])


# What may stand for each argument beside what stands there, by its place.
NOTHING, NONE, FALSE, TRUE = "tuple ()", "NoneType None", "bool False", "bool True"
NUMBERS = {"float 0.5", "float64 2.0", f"int {2**63}"}
RIGHT = {
    "launch": {2: NUMBERS},
    "straight": {0: {NOTHING}, 5: {NONE}, 6: {FALSE}, 7: NUMBERS | {NONE}, 9: {FALSE}, 10: {FALSE, TRUE}},
    TRAINED: {0: {NOTHING}, 5: {NONE}, 6: {FALSE}, 7: NUMBERS | {NONE}, 9: {FALSE, TRUE}, 10: {FALSE}},
    "remembered": {0: {NOTHING}, 4: {FALSE, TRUE}},
    "launched": {0: {NOTHING}},
}


def attack_arguments(calls):
    """Each in turn is something else."""
    for name, right in RIGHT.items():
        for place in range(COUNTS[function_of(name)]):
            for other in ODD if (name, place) != ("straight", 11) else ():  # which nobody calls
                done = answer(name, *replaced(calls[name], place, other))
                is_plain = isinstance(other, (bool, int, float, type(None))) or (type(other) is tuple and not other)
                is_right = is_plain and f"{type(other).__name__} {other}" in right.get(place, ())
                is_right |= (name, place) == (TRAINED, 2) and type(other) is torch.Tensor and other.requires_grad
                assert (done is not False) == is_right, (name, place, type(other))


def attack_tensors(calls):
    """Each of a tuple in turn is something else. The log-sum-exp may be left out, and `launch` takes what is like Q."""
    for name, place in (("launch", 1), ("remembered", 2), ("launched", 2), ("launched", 4)):
        for at, each in enumerate(calls[name][place]):
            for other in ODD:
                done = answer(name, *replaced(calls[name], place, replaced(calls[name][place], at, other)))
                is_like_q = isinstance(other, torch.Tensor) and (type(other) is Sub or other.requires_grad)
                is_right = other is None and (each is None or (name, at) == ("launch", 4))
                of_its_own = is_like_q and type(other) is torch.Tensor  # others are Q's memory
                is_right |= name == "launch" and ((at == 0 and is_like_q) or (at == 3 and of_its_own))
                is_right |= (name, place, at) == ("launched", 4, 0) and of_its_own
                assert (done is not False) == is_right, (name, at, type(other))
    tensors, options = calls["said"]
    for other in ODD:
        for given in ((*tensors, other), options), (tensors, (*options, other)), (other, options), (tensors, other):
            assert type(answer("said", *given)) in (bytes, bool)


def attack_entries(calls):
    """What stands ready, or is remembered, is nothing that operator.py or step.py puts there."""
    onlookers, plans, *rest = calls["remembered"]
    ((key, (plan, scale, like, *_)),) = plans.items()
    bad = (*ODD, (plan,), (plan, scale), (5, scale, like), (None, None, None), (Plan(), scale, like))
    bad += tuple((plan, other, like) for other in (True, 10**400, math.nan, Evil(), "1"))
    for entry in bad:
        assert answer("remembered", onlookers, {key: entry}, *rest) is False
    assert answer("remembered", onlookers, {key: (plan, 1, like)}, *rest) is not False
    for other in ODD:
        assert answer("remembered", onlookers, {key: (plan, scale, other)}, *rest[:-1], True) is False
    onlookers, plans, *rest = calls["launched"]
    ((key, (plan, scale, *_)),) = plans.items()
    for entry in (*ODD, (plan,), (5, scale), (None, None), (Plan(), scale), (plan, "1"), (plan, Evil())):
        assert answer("launched", onlookers, {key: entry}, *rest) is False
    onlookers, ready, *rest = calls["straight"]
    for other in ODD:
        for found in (other, SimpleNamespace(plan=other)):
            assert answer("straight", onlookers, dict.fromkeys(ready, found), *rest) is False


def copied(calls, name):
    """Arguments of a call, with plans that nobody else has, and what has them."""
    onlookers, had, *rest = calls[name]
    if function_of(name) == "straight":
        had = {kind: SimpleNamespace(plan=Plan.from_buffer_copy(each.plan)) for kind, each in had.items()}
    else:
        had = {key: (Plan.from_buffer_copy(plan), *more) for key, (plan, *more) in had.items()}
    return (onlookers, had, *rest), had


def attack_from_within(calls, driver):
    """Python drops what C++ was lent, at each place where it may run."""
    for name in BY_PLANS:
        for of_torch in OF_TORCH + (OF_GRADIENTS if name == TRAINED else ()):
            given, had = copied(calls, name)
            usual = getattr(torch._C, of_torch)

            def dropping(*arguments, had=had, usual=usual, of_torch=of_torch):
                had.clear()
                setattr(torch._C, of_torch, usual)  # which drops this
                gc.collect()
                return usual(*arguments)

            setattr(torch._C, of_torch, dropping)
            del dropping
            answer(name, *given)
            setattr(torch._C, of_torch, usual)
            assert not had or of_torch == "_cuda_isCurrentStreamCapturing", "which only workspaces ask"
        given, had = copied(calls, name)
        driver.on_launch = lambda had=had: had.clear() or gc.collect()
        assert answer(name, *given) is not False
        assert not had
        driver.on_launch = lambda: None
        gc.collect()
        answer(name, *given)  # the kind that was found last is gone


def attack_odd_answers(calls):
    """What torch tells is nothing that it can tell."""
    for name in (*BY_PLANS, "launch"):
        for of_torch in OF_TORCH + OF_GRADIENTS:
            usual = getattr(torch._C, of_torch)
            for other in (None, "x", 10**400, 0.5, Evil(), torch.zeros(3, 3).to_sparse()):
                setattr(torch._C, of_torch, lambda *_, other=other: other)
                answer(name, *calls[name])
            setattr(torch._C, of_torch, lambda *_: 1 / 0)
            answer(name, *calls[name])
            setattr(torch._C, of_torch, usual)
    plan = calls["launch"][0]
    workspace = plan.workspaces[0]
    lend, of_stream = workspace.lend, workspace.of_stream
    for other in (None, "x", 10**400, 0.5, np.zeros(9), torch.zeros(3, 3).to_sparse()):
        for workspace.lend, workspace.of_stream in (
            (lambda *_, other=other: other, {}),
            (lend, {fake_cuda.STREAM: other}),
        ):
            assert answer("launch", *calls["launch"]) is False
    for workspace.lend, workspace.of_stream in ((5, {}), (lend, 5)):
        assert answer("launch", *calls["launch"]) is False
    workspace.lend, workspace.of_stream = lend, of_stream


def attack_by_threads(driver, public):
    """Calls go on while others make kinds ready, and forget what is planned."""
    sys.setswitchinterval(1e-6)

    def calling(_):
        for _ in range(500):
            for call in public:
                assert call() is not None

    def forgetting(_):
        for heads in (1, 2, 3, 5, 6) * 20:
            wide = torch.zeros(1, 64, heads, 64).bfloat16()
            attention(wide, wide, wide, version=VERSION)
            operator.plain = dict(operator.plain)
            for key in list(step.planned):
                step.planned.pop(key, None)
            backward.planned.clear()
            operator.planned.clear()

    with ThreadPoolExecutor(5) as pool, torch.no_grad():
        for work in [pool.submit(work, None) for work in (calling, forgetting, calling, calling, forgetting)]:
            work.result()
    driver.launches.clear()
    sys.setswitchinterval(0.005)


def attack_references(calls):
    """Each call drops what it took, whether it launches or not."""
    wrong = [
        (name, replaced(given, place, other))
        for name, given in calls.items()
        for place in range(len(given))
        for other in (None, True, 10**400, (5,), Evil(), Q.float(), Plan())
    ]
    every = [*calls.items(), *wrong]
    things = [None, True, False, -1, VERSION, *(each for _, given in every for each in given)]
    things += [getattr(torch._C, name) for name in OF_TORCH + OF_GRADIENTS]
    things += [each for name in BY_PLANS for each in calls[name][1].values()]
    things += [each for given in calls.values() for part in given if isinstance(part, tuple) for each in part]
    things += [each for entry in calls["remembered"][1].values() for each in entry]

    def counted(rounds):
        references, blocks = [sys.getrefcount(each) for each in things], sys.getallocatedblocks()
        for _ in range(rounds):
            for name, given in every:
                answer(name, *given)
        gc.collect()
        blocks = sys.getallocatedblocks() - blocks
        return blocks, max(abs(sys.getrefcount(each) - count) for each, count in zip(things, references, strict=True))

    counted(3)
    found = [counted(rounds=50) for _ in range(6)]  # the first ones fill what Python and torch keep for later
    assert max(references for _, references in found) < 25, "a reference more, or less, at each call"
    assert min(blocks for blocks, _ in found) < 25, "an object more at each call"


def survive(path):
    os.environ.pop("LD_PRELOAD", None)  # a sanitizer is for this process, not for compilers
    warnings.simplefilter("ignore")
    attack_before_set_up(path)
    driver = fake_cuda.for_attention(pytest.MonkeyPatch())
    fast_path.extension = fast_path.loaded(Path(path))
    public = (
        lambda: attention(Q, K, K, version=VERSION),
        lambda: attention(Q, K, K, window=(9, 0)),
        lambda: flash_attn_with_kvcache(ROW, K, K, cache_seqlens=LENGTHS),
        lambda: torch.autograd.grad(attention(*WANTING, WANTING[1], version=VERSION), WANTING, Q),
    )
    for call in public * 3:
        call()
    caches = (ROW, K, K, LENGTHS, *[None] * 11)
    asked, plain = (False, None, (-1, -1), 0.0, True, 0), (False, 0.125, VERSION, False)
    inputs = (Q, K, K, Q, Q, new_lse(Q), *[None] * 6)
    of_both, gradients = (
        (False, None, None, None, 0.0, 0.0, 0, 0, False, True, True),
        tuple(map(torch.empty_like, (Q, K, K))),
    )
    ((kind, ready),) = (
        (kind, ready)
        for kind, ready in operator.plain.items()
        if kind == (VERSION, Q.dtype, Q.device, 4, False, 64, False, False, False, None)
    )
    of_gradients = (VERSION, Q.dtype, Q.device, 4, False, 64, False, True, False, False)
    ready_for_both = {of_gradients: operator.plain[of_gradients]}
    tensors = (Q, K, K, torch.empty_like(Q), new_lse(Q))
    calls = {
        "launch": (ready.plan, tensors, 0.125),
        "straight": (operator.onlookers, {kind: ready}, Q, K, K, torch.empty_like(Q), *plain, False, None),
        TRAINED: (operator.onlookers, ready_for_both, WANTING[0], K, K, None, *plain, False, differentiable.attach),
        "launched": (operator.onlookers, dict(backward.planned), inputs, of_both, gradients),
        "remembered": (operator.onlookers, dict(step.planned), caches, asked, False),
        "said": (caches, asked),
    }
    attack_counts(calls)
    attack_arguments(calls)
    attack_tensors(calls)
    attack_entries(calls)
    attack_from_within(calls, driver)
    attack_odd_answers(calls)
    attack_set_up()
    attack_by_threads(driver, public)
    driver.cuLaunchKernel = lambda *_: (0,)
    attack_references(calls)
    print("survived")


if __name__ == "__main__":
    survive(sys.argv[1])
