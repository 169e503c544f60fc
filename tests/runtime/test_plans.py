"""Plans of one problem: operations whose sizes follow a rule launch in C++ what they launch in Python."""

import functools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashladder import flash_attn_with_kvcache
from flashladder.common.api import operator, step
from flashladder.common.api.options import Options
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.runtime import fast_path
from flashladder.tests.support import fake_cuda

HEADS, HEADS_K, COLUMNS, PAGES = 4, 2, 64, 6


@pytest.fixture
def driver(monkeypatch):
    """CPU tensors are taken for ones on a GPU, whose launches are noted."""
    made, extension = fake_cuda.for_attention(monkeypatch), fast_path.made()
    monkeypatch.setattr(fast_path, "extension", extension)
    return made


class Answering:
    """C++ that leaves all to Python; or does not, and notes by which of its ways it launched."""

    def __init__(self, extension=None):
        self.ways = []
        self.said = getattr(extension, "said", lambda *given: None)
        self._extension = extension

    def launch(self, *given):
        made = bool(self._extension) and self._extension.launch(*given)
        self.ways += ["plan"] if made else []
        return made

    def remembered(self, *given):
        made = self._extension and self._extension.remembered(*given)
        self.ways += [] if made is None else ["look-up"]
        return made

    def launched(self, *given):
        made = bool(self._extension) and self._extension.launched(*given)
        self.ways += ["look-up"] if made else []
        return made


ONCE_KNOWN = ["plan", "look-up", "look-up"]


def launched(driver, call):
    """What a call launched, with nothing of where its outputs lie."""
    driver.launches.clear()
    made = call()

    def shown(launch):
        params = launch.arguments[0]
        for tensor in made:
            params = params.replace(tensor.data_ptr().to_bytes(8, "little"), bytes(8))
        return launch.function, launch.shape, launch.stream, params

    return [shown(launch) for launch in driver.launches]


def launched_in_python(driver, monkeypatch, call):
    """The same; the stand-in notes kernels' arguments as long as they are, from now on."""
    ready_for = operator.ready_for

    def noting(*given):
        found = ready_for(*given)
        driver.parts |= {each.entry: (each.launch.params_bytes,) for each in found.artifact.kernels}
        return found

    with monkeypatch.context() as patch:
        patch.setattr(fast_path, "extension", Answering())
        patch.setattr(operator, "ready_for", noting)
        call()
        return launched(driver, call)


def asked(batch, rows, page_size, paged, kind, splits, new=0, rotary=False):
    """A call with caches, and what it takes."""
    drawn = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)  # noqa: E731
    numbers = lambda *shape: torch.zeros(shape, dtype=torch.int32)  # noqa: E731
    caches = [drawn(PAGES if paged else batch, page_size, HEADS_K, COLUMNS) for _ in range(2)]
    more = {
        "plain": {},
        "window": {"window_size": (5, 0), "softcap": 3.0},
        "all": {"cache_leftpad": numbers(batch), "alibi_slopes": torch.zeros(batch, HEADS), "softmax_scale": 0.5},
        "served": {"s_aux": torch.zeros(HEADS), "out": drawn(batch, rows, HEADS, COLUMNS)},
        "a tree": {"tree_mask": numbers(batch, rows), "window_size": (5, 0)},
    }[kind]
    options = {
        "cache_seqlens": numbers(batch),
        "num_splits": splits,
        "causal": True,
        "return_softmax_lse": True,
        **more,
    }
    if paged:
        options["block_table"] = numbers(batch, 3)
    if new:
        options |= {name: drawn(batch, new, HEADS_K, COLUMNS) for name in ("k", "v")}
        options |= {name: drawn(200, 16) for name in ("rotary_cos", "rotary_sin") if rotary}
    q = drawn(batch, rows, HEADS, COLUMNS)
    return lambda: flash_attn_with_kvcache(q, *caches, **options)


@pytest.mark.slow
def test_decode(driver, monkeypatch):
    """By a plan of the problem from its second call on, and then before Python looks at anything."""

    @given(
        st.integers(1, 3),
        st.integers(1, 5),
        st.sampled_from([1, 16, 40]),
        st.booleans(),
        st.sampled_from(["plain", "window", "all", "served", "a tree"]),
        st.sampled_from([0, 3]),
    )
    def same(batch, rows, page_size, paged, kind, splits):
        call = asked(batch, rows, page_size, paged, kind, splits)
        expected = launched_in_python(driver, monkeypatch, call)
        with monkeypatch.context() as patch:
            patch.setattr(fast_path, "extension", noted := Answering(fast_path.extension))
            for _ in range(3):
                assert launched(driver, call) == expected
        assert noted.ways == ONCE_KNOWN

    same()


def test_of_many_problems_the_latest_are_kept(driver, monkeypatch):
    monkeypatch.setattr(operator, "PROBLEMS_KEPT", 3)
    kept = []
    for batch in (1, 2, 3, 4):
        call = asked(batch, 1, 16, False, "plain", 0)
        call()
        call()
        kept.append({*step.planned})
    assert [len(keys) for keys in kept] == [1, 2, 3, 3], "what is given and what is validated are the same here"
    assert kept[0] < kept[1] < kept[2]
    assert kept[2] - kept[3] == kept[0]


@pytest.mark.parametrize("scale", [1, True, 1.0, np.float64(1), torch.tensor(1)], ids=repr)
def test_a_scale_of_any_number(driver, monkeypatch, scale):
    """Is told as a float, also from a plan that C++ looks up by what was given."""
    q, cache = torch.zeros(2, 1, HEADS, COLUMNS).bfloat16(), torch.zeros(2, 9, HEADS_K, COLUMNS).bfloat16()
    call = functools.partial(flash_attn_with_kvcache, q, cache, cache, cache_seqlens=torch.tensor([3, 5]).int())
    expected = launched_in_python(driver, monkeypatch, lambda: call(softmax_scale=1.0, return_softmax_lse=True))
    monkeypatch.setattr(fast_path, "extension", noted := Answering(fast_path.extension))
    for _ in range(3):
        assert launched(driver, lambda: call(softmax_scale=scale, return_softmax_lse=True)) == expected
    assert noted.ways == ONCE_KNOWN
    assert {type(scale) for _, scale, *_ in step.planned.values()} <= {float}


@pytest.mark.gpu
def test_a_scale_of_any_number_on_a_gpu():
    """Gives the same bits, in C++ as in Python."""
    fast_path.load()
    assert fast_path.extension, fast_path.missing
    q, cache = (torch.randn(2, rows, HEADS, 128, device="cuda").bfloat16() for rows in (1, 90))
    lengths = torch.tensor([80, 5], device="cuda").int()
    call = functools.partial(flash_attn_with_kvcache, q, cache, cache, cache_seqlens=lengths)
    expected = call(softmax_scale=1.0)
    for scale in (1, True, np.float64(1), torch.tensor(1)):
        assert all(torch.equal(call(softmax_scale=scale), expected) for _ in range(4))


def test_a_number_in_tuples_without_end(driver):
    """Is refused by name: C++ does not follow it."""
    q, cache = torch.zeros(2, 1, HEADS, COLUMNS).bfloat16(), torch.zeros(2, 9, HEADS_K, COLUMNS).bfloat16()
    softcap = functools.reduce(lambda found, _: (found,), range(1_000_000), 0.0)
    with pytest.raises(UnsupportedProblemError, match=r"softcap is of type tuple"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([3, 5]).int(), softcap=softcap)


SCALES = dict.fromkeys(("k_descale", "v_descale"), torch.ones(2, HEADS_K))


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.bfloat16, {}),
        (torch.float8_e4m3fn, SCALES),
        (torch.float8_e4m3fn, {}),
        (torch.float8_e4m3fn, {"k_descale": torch.ones(1, HEADS_K)}),
    ],
)
def test_caches_in_8_bits(driver, monkeypatch, dtype, scales):
    """By a plan too, as on Hopper, where the combining kernel begins before the other one is done."""
    q, cache = torch.zeros(2, 1, HEADS, COLUMNS).bfloat16(), torch.zeros(2, 9, HEADS_K, COLUMNS).to(dtype)
    options = {"cache_seqlens": torch.tensor([3, 5]).int(), "return_softmax_lse": True, "num_splits": 2, **scales}
    call = functools.partial(flash_attn_with_kvcache, q, cache, cache, **options)
    are_made = dtype == torch.float8_e4m3fn and scales is not SCALES  # tensors, at each call anew
    shown = lambda launch: launch[:3] if are_made else launch  # noqa: E731
    expected = [*map(shown, launched_in_python(driver, monkeypatch, call))]
    assert [function for function, *_ in expected] == ["attention_decode", "combine"]
    monkeypatch.setattr(fast_path, "extension", noted := Answering(fast_path.extension))
    for _ in range(3):
        assert [*map(shown, launched(driver, call))] == expected
    assert noted.ways == ONCE_KNOWN


def interleaved(batch, room):
    """K and V in one tensor, as pages of vLLM and SGLang may have them."""
    return torch.zeros(batch, 2, room, HEADS_K, COLUMNS).bfloat16().unbind(1)


@pytest.mark.slow
def test_new_keys(driver, monkeypatch):
    """Are written by a kernel of the same plan, which the host leaves out where there are none."""

    @given(
        st.integers(1, 3),
        st.sampled_from([1, 40]),
        st.booleans(),
        st.sampled_from(["plain", "all"]),
        st.integers(1, 3),
        st.booleans(),
    )
    def same(batch, page_size, paged, kind, new, rotary):
        call = asked(batch, 2, max(page_size, 3), paged, kind, 0, new, rotary)
        expected = launched_in_python(driver, monkeypatch, call)
        assert [function for function, *_ in expected] == ["append", "attention_decode"]
        assert expected[0][1][:3] == [new, batch, 1]
        with monkeypatch.context() as patch:
            patch.setattr(fast_path, "extension", noted := Answering(fast_path.extension))
            for _ in range(3):
                assert launched(driver, call) == expected
        assert noted.ways == ONCE_KNOWN

    same()


def test_new_keys_in_caches_of_one_tensor(driver, monkeypatch):
    """Where K and V lie between each other, C++ launches too; where elements lie on each other, nothing does."""
    q, new = torch.zeros(2, 1, HEADS, COLUMNS).bfloat16(), torch.zeros(2, 1, HEADS_K, COLUMNS).bfloat16()
    lengths, noted = torch.zeros(2, dtype=torch.int32), Answering(fast_path.extension)
    monkeypatch.setattr(fast_path, "extension", noted)
    for _ in range(4):
        flash_attn_with_kvcache(q, *interleaved(2, 9), new, new, cache_seqlens=lengths)
    assert noted.ways == ONCE_KNOWN
    same = interleaved(1, 9)[0].expand(2, -1, -1, -1)
    with pytest.raises(UnsupportedProblemError, match=r"k_cache has strides .* elements lie on each other"):
        flash_attn_with_kvcache(q, same, interleaved(2, 9)[1], new, new, cache_seqlens=lengths)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (lambda k, v, new: (k, k, new, new), "k_cache shares memory with v_cache"),
        (lambda k, v, new: (k[:, :-1], k[:, 1:], new, new), "k_cache shares memory with v_cache"),
        (lambda k, v, new: (k, v, k[:, :1], new), "k_cache shares memory with k;"),
        (lambda k, v, new: (k, v, new, v[:, 2:3]), "v_cache shares memory with v;"),
    ],
)
def test_caches_that_lie_on_other_tensors_are_refused(driver, way, words):
    """Also once C++ knows calls of these shapes, of which interleaved ones are right."""
    q, (k, v) = torch.zeros(2, 1, HEADS, COLUMNS).bfloat16(), interleaved(2, 9)
    given = way(k, v, torch.zeros(2, 1, HEADS_K, COLUMNS).bfloat16())
    options = {"cache_seqlens": torch.zeros(2, dtype=torch.int32)}
    apart = interleaved(2, given[0].shape[1])
    for _ in range(3):
        flash_attn_with_kvcache(q, *apart, *(x.clone() for x in given[2:]), **options)
    driver.launches.clear()
    with pytest.raises(UnsupportedProblemError, match=words):
        flash_attn_with_kvcache(q, *given, **options)
    assert not driver.launches


@pytest.mark.parametrize(
    "given",
    [
        {"cache_seqlens": 5},
        {},
        {"cache_seqlens": torch.tensor([3, 4]).int(), "alibi_slopes": torch.ones(HEADS)},
        {"cache_seqlens": torch.tensor([3, 4]).int(), "cache_batch_idx": torch.tensor([2, 0]).int()},
    ],
    ids=["a length of the host", "no length", "slopes of heads", "sequences of a larger cache"],
)
def test_what_is_brought_into_shape_first(driver, monkeypatch, given):
    """By Python, at each call; then it is looked up as well."""
    q = torch.zeros(2, 1, HEADS, COLUMNS).bfloat16()
    cache = torch.zeros(3 if "cache_batch_idx" in given else 2, 9, HEADS_K, COLUMNS).bfloat16()
    monkeypatch.setattr(fast_path, "extension", noted := Answering(fast_path.extension))
    for _ in range(4):
        flash_attn_with_kvcache(q, cache, cache, **given)
    assert noted.ways == ONCE_KNOWN


def test_a_head_dim_that_is_padded_has_no_plan_of_its_own(driver):
    """Each call makes copies anew."""
    q, cache = torch.zeros(2, 1, HEADS, 40).bfloat16(), torch.zeros(2, 9, HEADS_K, 40).bfloat16()
    for _ in range(3):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([3, 5]).int())
    assert [launch.function for launch in driver.launches].count("attention_decode") == 3
    assert not step.planned


def test_a_known_call_runs_two_functions_here(driver, monkeypatch):
    """All else is C++'s, also where the log-sum-exp is asked for, and where new keys are given."""
    q, cache = torch.zeros(2, 1, HEADS, COLUMNS).bfloat16(), torch.zeros(2, 9, HEADS_K, COLUMNS).bfloat16()
    lengths, ran = torch.zeros(2, dtype=torch.int32), []
    for more in ({}, {"return_softmax_lse": True}, {"k": q[:, :, :HEADS_K], "v": q[:, :, :HEADS_K]}):
        for _ in range(4):
            ran.clear()
            sys.setprofile(lambda frame, event, _: ran.append(frame) if event == "call" else None)
            flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=lengths, **more)
            sys.setprofile(None)
        here = [frame.f_code.co_name for frame in ran if frame.f_globals["__name__"].startswith("flashladder.common.")]
        assert here == ["flash_attn_with_kvcache", "in_cpp"]


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["all", "dQ", "dK and dV"])
def test_the_backward_pass(driver, monkeypatch, wanted):
    a, lse = torch.zeros(2, 100, 2, 96).bfloat16(), torch.zeros(2, 2, 100)  # of a rung without dependent kernels
    options = Options(causal=True).flat()
    call = lambda: torch.ops.flashladder.attention_backward(a, a, a, a, a, lse, None, *options, *wanted, False)  # noqa: E731
    expected = launched_in_python(driver, monkeypatch, call)
    assert len(expected) > 1
    monkeypatch.setattr(fast_path, "extension", noted := Answering(fast_path.extension))
    assert launched(driver, call) == launched(driver, call) == launched(driver, call) == expected
    assert noted.ways == ONCE_KNOWN


def test_the_gradient_of_sinks(driver, monkeypatch):
    """Of which what each row adds, that nobody is given, lies anywhere."""
    a, lse = torch.zeros(2, 100, 2, 96).bfloat16(), torch.zeros(2, 2, 100)
    options = Options(causal=True, sinks=torch.zeros(2)).flat()
    wanted = True, True, True

    def call():
        return torch.ops.flashladder.attention_backward(a, a, a, a, a, lse, None, *options, *wanted)

    expected = [each[:3] for each in launched_in_python(driver, monkeypatch, call)]
    monkeypatch.setattr(fast_path, "extension", noted := Answering(fast_path.extension))
    for _ in range(3):
        assert [each[:3] for each in launched(driver, call)] == expected
    assert noted.ways == ONCE_KNOWN


def test_what_changes_is_looked_at_again(driver, monkeypatch):
    """By C++, which leaves tensors out of the ordinary to Python, and that refuses them by name."""
    q, cache = torch.zeros(2, 1, HEADS, COLUMNS).bfloat16(), torch.zeros(2, 9, HEADS_K, COLUMNS).bfloat16()
    lengths, call = torch.zeros(2, dtype=torch.int32), flash_attn_with_kvcache
    with torch.no_grad():
        for _ in range(4):
            call(q, cache, cache, cache_seqlens=lengths)
    for changed, words in (
        ({"cache_seqlens": lengths.long()}, "cache_seqlens is"),
        ({"v_cache": cache.half()}, "v_cache is torch.float16"),
        ({"v_cache": cache[:, :8]}, "v_cache has shape"),
        ({"num_splits": True}, "num_splits"),
        ({"causal": 0}, "causal=0"),
        ({"window_size": (1, [])}, "window_size"),
        ({"block_table": [[1]]}, "block_table"),
        ({"q": q.clone().requires_grad_()}, "want a gradient"),
    ):
        given = {"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": lengths} | changed
        with pytest.raises(UnsupportedProblemError, match=words):
            call(**given)
