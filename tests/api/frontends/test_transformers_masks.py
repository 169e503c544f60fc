"""transformers' masks, as `masks.make` says them: each stands for the mask that "sdpa" would have."""

import gc
import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashladder.common.api import expressions
from flashladder.common.api.options import options_of
from flashladder.common.api.packed import attention_in_documents
from flashladder.common.api.validate import OPEN
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.problem.operations import forward

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")

import test_transformers  # noqa: E402
from test_transformers import PADDED  # noqa: E402

from flashladder.common.api.frontends import masks, written_masks  # noqa: E402

pytestmark = pytest.mark.slow
registered = test_transformers._registered  # a fixture of each test


@given(
    q_length=st.integers(1, 4),
    past=st.integers(0, 4),
    room=st.integers(0, 3),
    sees=st.sampled_from(["causal", "window of 2", "window of 20", "all", "chunks of 3", "sides of 2"]),
    skip=st.sampled_from([True, True, False]),
    hidden=st.none() | st.integers(1, 2**16 - 1),
)
def test_masks_are_those_of_sdpa(q_length, past, room, sees, skip, hidden):
    """Whatever kind is chosen, it stands for the mask that sdpa would have, in all rows of queries that are real."""
    from transformers import masking_utils

    causal, window = sees not in ("all", "sides of 2"), int(sees.rpartition(" ")[2]) if "of" in sees else None
    seen, keys = past + q_length, past + q_length + (room if causal else 0)  # no room behind for who sees all
    function = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    padding = None
    if hidden is not None:
        padding = (hidden >> torch.arange(16)).reshape(2, 8)[:, :seen] % 2 == 0
    if "window" in sees:
        function = masking_utils.sliding_window_causal_mask_function(window)
    elif "sides" in sees:
        function = masking_utils.sliding_window_bidirectional_mask_function(window)
    elif "chunks" in sees:
        nothing_yet = torch.zeros(2, 1, dtype=torch.bool) if padding is None else padding.cumsum(1) == 0
        function = masking_utils.chunked_causal_mask_function(window, nothing_yet.sum(1))
    lengths = {"batch_size": 2, "q_length": q_length, "kv_length": keys, "q_offset": past}
    options = {**lengths, "mask_function": function, "attention_mask": padding, "local_size": window}
    exact = masking_utils.sdpa_mask(**options, allow_is_causal_skip=False)
    skips = {"allow_is_causal_skip": causal and skip, "allow_is_bidirectional_skip": not causal and skip}
    whole = masks.whole(masks.make(**options, **skips), q_length, keys, causal, torch.device("cpu"))
    if whole is None:  # all keys, or the causal square
        whole = torch.ones(1, 1, q_length, keys).tril(0 if causal and q_length > 1 else keys).bool()
    real = torch.ones(2, q_length).bool() if padding is None or not causal else padding[:, past:]
    shape = (2, 1, q_length, keys)
    assert torch.equal(whole.expand(shape)[:, 0][real], exact.expand(shape)[:, 0][real])


@given(starts=st.integers(0, 2**8 - 1), window=st.sampled_from([None, 2, 20]), documents_first=st.booleans())
def test_packed_masks_are_those_of_sdpa(starts, window, documents_first):
    """Sequences that begin at these places, and at the first one, without padding or a cache.

    Releases of transformers lay the parts over each other in either order, and the oldest moves no positions.
    """
    from transformers import masking_utils

    begins = (starts >> torch.arange(8)).reshape(1, 8) % 2 == 1
    begins[:, 0] = True
    places = torch.arange(8)[None]
    positions = places - torch.where(begins, places, 0).cummax(1).values
    inner = masking_utils.sliding_window_causal_mask_function(window) if window else masking_utils.causal_mask_function
    sequences = begins.cumsum(1) - 1
    moved = getattr(masking_utils, "remap_positions_for_packed_sequence", lambda inner, _: inner)(inner, positions)
    parts = moved, masking_utils.packed_sequence_mask_function(sequences)
    function = masking_utils.and_masks(*reversed(parts) if documents_first else parts)
    options = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": function, "local_size": window}
    mask = masks.make(**options, allow_is_causal_skip=False)
    assert mask.dtype == torch.int32
    exact = masking_utils.sdpa_mask(**options, allow_is_causal_skip=False)
    assert torch.equal(masks.whole(mask, 8, 8, True, torch.device("cpu")), exact)


def test_parts_of_masks_that_are_not_known_are_written(monkeypatch):
    """Also where a release of transformers has another name for one. What no expression says is drawn."""
    from transformers import masking_utils

    chunks = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))
    twice = masking_utils.and_masks(*map(masking_utils.sliding_window_causal_mask_function, (2, 3)))
    ours = masking_utils.and_masks(masking_utils.causal_mask_function, lambda batch, head, q, k: k != 1)
    coprime = masking_utils.and_masks(ours, lambda batch, head, q, k: torch.gcd(q, k) == 1)
    options = {"batch_size": 1, "q_length": 8, "kv_length": 8, "allow_is_causal_skip": False}
    assert masks.make(mask_function=chunks, **options).dtype == torch.int32
    assert masks.make(mask_function=twice, local_size=2, **options).dim() == written_masks.DIMENSIONS
    assert masks.make(mask_function=ours, use_vmap=True, **options).dim() == written_masks.DIMENSIONS
    drawn = masks.make(mask_function=coprime, **options)
    assert drawn.shape == (1, 1, 8, 8)
    assert "uses gcd of torch" in written_masks.refusals[drawn]
    masks._known.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(masking_utils, "chunked_overlay")
        assert masks.make(mask_function=chunks, **options).dim() == written_masks.DIMENSIONS
    masks._known.cache_clear()


def _blocks(masking_utils, ids):
    return masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(ids))


def _packed_chunks(masking_utils, ids):
    documents = ids.div(3, rounding_mode="floor")
    at = torch.arange(ids.shape[1])
    positions = at - (documents[:, None] == documents[..., None]).int().argmax(2)
    chunks = masking_utils.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64))
    moved = masking_utils.remap_positions_for_packed_sequence(chunks, positions)
    return masking_utils.and_masks(moved, masking_utils.packed_sequence_mask_function(documents))


def _windowed_blocks(masking_utils, ids):
    return masking_utils.and_masks(masking_utils.sliding_window_overlay(4), _blocks(masking_utils, ids))


@pytest.mark.parametrize("kind", [_blocks, _packed_chunks, _windowed_blocks])
@given(
    q_length=st.integers(1, 6),
    past=st.integers(0, 6),
    room=st.integers(0, 3),
    kv_offset=st.integers(0, 4),
    seed=st.integers(0, 2**31),
    is_padded=st.booleans(),
)
def test_written_masks_are_those_of_sdpa(kind, q_length, past, room, kv_offset, seed, is_padded):
    """Wherever rows and keys begin: each text, evaluated, shows what the function does."""
    from transformers import masking_utils

    generator = torch.Generator().manual_seed(seed)
    kv_offset = min(kv_offset, past)
    keys = past + q_length + room - kv_offset
    ids = torch.randint(-1, 2, (2, past + q_length + room), generator=generator).cummax(1).values
    ids = ids + torch.randint(0, 2, ids.shape, generator=generator).cumsum(1)
    padding = torch.rand(2, past + q_length, generator=generator) < 0.8 if is_padded else None
    lengths = {"batch_size": 2, "q_length": q_length, "kv_length": keys, "q_offset": past, "kv_offset": kv_offset}
    options = {**lengths, "mask_function": kind(masking_utils, ids), "attention_mask": padding}
    exact = masking_utils.sdpa_mask(**options, allow_is_causal_skip=False)
    with patch.object(masks, "FEW_QUERIES", 0):
        mask = masks.make(**options, allow_is_causal_skip=False)
    asked = written_masks.written(mask).options
    assert torch.equal(masks.whole(mask, q_length, keys, True, torch.device("cpu")), exact)
    q, k = (torch.zeros(2, rows, 1, 64).bfloat16() for rows in (q_length, keys))
    assert torch.equal(shown(asked, q, k), exact[:, 0])
    if kind is _packed_chunks and past == kv_offset and not room:
        assert asked["causal"]


def shown(asked, q, k):
    """Which keys the rows see by an expression: (batch, rows, keys)."""
    options = options_of(
        q.device, len(q), 1, causal=asked["causal"], softmax_scale=None, window=OPEN, softcap=0.0, alibi_slopes=None,
        sinks=None, dropout_p=0.0, deterministic=False, version="51",
    )  # fmt: skip
    found = expressions.added(options, asked["mask"], None, asked["tensors"], q, k)
    expressions.check(found, q, k)
    tensors = {"q": q, "k": k, "v": torch.eye(k.shape[1], 64).bfloat16()[None, :, None].expand(len(k), -1, -1, -1)}
    problem = found.forward_problem(q, k, k, lse=True)
    return forward.attention(problem, {**tensors, **found.tensors}, torch.float64)[0][:, :, 0, : k.shape[1]] > 0


def test_what_stands_for_a_mask_may_be_moved_and_is_forgotten():
    from transformers import masking_utils

    def made():
        function = _blocks(masking_utils, torch.zeros(1, 20, dtype=torch.int64))
        return masks.make(batch_size=1, q_length=20, kv_length=20, mask_function=function, allow_is_causal_skip=False)

    mask = made()
    assert mask.numel() == 0
    assert masks.make(attention_mask=mask, batch_size=1, q_length=20, kv_length=20) is mask
    moved = mask.clone()
    assert written_masks.written(moved) is written_masks.written(mask)
    del mask
    gc.collect()
    with pytest.raises(UnsupportedProblemError, match="a forward pass that is over"):
        written_masks.written(moved)


def test_a_mask_that_is_traced_is_that_of_sdpa():
    """Where it is ours; all else is left to "sdpa". Padding amid a window is refused when the graph runs."""
    from transformers import masking_utils

    config = transformers.MistralConfig
    lengths = {"batch_size": 2, "q_length": 12, "kv_length": 12, "config": config(sliding_window=3)}
    sequences = (torch.arange(12) >= torch.tensor([[3], [6]])).long()
    window = masking_utils.sliding_window_causal_mask_function
    causal, packed = masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function
    sides, chunks = masking_utils.sliding_window_bidirectional_mask_function, masking_utils.chunked_causal_mask_function
    cases = {
        "causal": (lambda _: causal, {}),
        "packed": (lambda of: masking_utils.and_masks(packed(of), causal), {"allow_is_causal_skip": False}),
        "window": (lambda _: window(3), {"local_size": 3}),
        "packed in a window": (
            lambda of: masking_utils.and_masks(window(3), packed(of)),
            {"local_size": 3, "allow_is_causal_skip": False},
        ),
        "wide window": (
            lambda _: window(20),
            {"local_size": 20, "config": config(sliding_window=20)},
        ),
        "- all": (lambda _: masking_utils.bidirectional_mask_function, {"allow_is_bidirectional_skip": True}),
        "- sides": (lambda _: sides(3), {"local_size": 3, "allow_is_bidirectional_skip": False}),
        "- chunks": (lambda of: chunks(3, of[:, 0]), {"local_size": 3, "config": transformers.LlamaConfig()}),
        "- own": (lambda of: masking_utils.and_masks(causal, packed(of)), {"use_vmap": True}),
        "- or": (lambda of: masking_utils.or_masks(causal, packed(of)), {"allow_is_causal_skip": False}),
        "- cached": (lambda _: causal, {"q_length": 5, "q_offset": 7}),
    }
    for (case, (function, more)), padding in itertools.product(cases.items(), (None, *PADDED.values())):
        options = {**lengths, **more, "attention_mask": None if padding is None else padding.bool()}

        @torch.compile(backend="eager", fullgraph=True)
        def made(of, attention_mask, function=function, options=options):
            return masks.make(**options | {"mask_function": function(of), "attention_mask": attention_mask})

        torch._dynamo.reset()
        mask = made(sequences, options["attention_mask"])
        if case.startswith("-") or (padding is None and "packed" not in case):
            assert mask is None or mask.dtype != torch.int32, case
            continue
        assert mask.dtype == torch.int32, case
        options |= {"mask_function": function(sequences), "allow_is_causal_skip": False}
        exact = masking_utils.sdpa_mask(**options)
        whole = masks.whole(mask, 12, 12, True, torch.device("cpu"))
        real = torch.ones(2, 12).bool() if padding is None else padding.bool()
        assert torch.equal(whole.expand(2, 1, 12, 12)[:, 0][real], exact.expand(2, 1, 12, 12)[:, 0][real]), case
    q = torch.zeros(2, 12, 1, 64, dtype=torch.bfloat16)
    scores = {"softmax_scale": None, "softcap": 0.0, "dropout_p": 0.0, "sinks": None, "window": (2, None)}
    with pytest.raises(UnsupportedProblemError, match=r"padding amid a sequence, in a window, under torch\.compile"):
        attention_in_documents(q, q, q, PADDED["within"].int(), **scores)
