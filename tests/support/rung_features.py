"""What a rung is held to for each feature that it says it takes, on the emulator, under the race detector.

Most of one feature share a configuration, which is compiled once: head_dim 64, bf16, a causal mask.
"""

import math

import pytest
import torch

from flashladder.common.problem.head_dims import HEAD_DIM_STEP, HEAD_DIMS
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.rung_expressions import OF_EXPRESSIONS
from flashladder.tests.support.rung_packed import (
    equal_lengths_are_a_batch,
    lengths_about_each_boundary,
    many_short_sequences,
    nothing_of_a_neighbour,
    rows_before_the_first_sequence,
    within_the_tensors_whatever_cu_seqlens_say,
    zeros_behind_the_last_sequence,
)
from flashladder.tests.support.rung_table import BOUNDARIES, built, climbing, emulated, id_of, masked, packed

# Of queries and keys, as in FlashAttention's own tests.
LENGTHS = ((1, 1), (1, 239), (799, 3), (113, 203), (128, 217))


# -- of every general rung


def rows_without_keys_and_hidden_keys(rung):
    """Zeros where a row sees nothing, whatever is in V; what is behind a row's own key does not reach it."""
    problem = masked(num_heads=4, num_heads_k=2, seqlen_q=200, seqlen_k=120, layout="padded")
    clean, _ = emulated(rung, problem)
    blind, last = 80, 40
    assert not clean.o[:, :blind].any()
    assert (clean.lse[:, :, :blind] == -math.inf).all()
    assert clean.lse[:, :, blind:].isfinite().all()
    tensors, artifact = make_inputs(problem), built(rung, problem)
    tensors.k[:, last:] = math.nan
    on_emulator(artifact, problem, tensors)
    assert torch.equal(tensors.o[:, : blind + last], clean.o[:, : blind + last])
    assert tensors.o[:, blind + last :].isnan().all()
    tensors = make_inputs(problem)
    tensors.v.fill_(math.nan)
    on_emulator(artifact, problem, tensors)
    assert not tensors.o[:, :blind].any()
    assert tensors.o[:, blind:].isnan().all()


def lengths_of_flash_attentions_tests(rung):
    for seqlen_q, seqlen_k in LENGTHS:
        emulated(rung, masked(num_heads=2, num_heads_k=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k))


def more_tiles_than_ctas(rung):
    emulated(rung, masked(batch=2, num_heads=2, seqlen_q=300, seqlen_k=129), num_sms=1)


def scores_that_climb(rung):
    """In fp16, whose range is the smaller one."""
    climbing(rung, 40, every=3, dtype="fp16")


def softmax_scales(rung):
    for scale in (1e-30, 3.0):
        emulated(rung, masked(seqlen_q=70, seqlen_k=90, softmax_scale=scale))


def the_same_o_without_lse(rung):
    """Also where rows are lost, in the second head."""
    runs = []
    for lse in (True, False):
        problem = masked(seqlen_q=100, seqlen_k=300, num_heads=2, lse=lse)
        tensors = make_inputs(problem)
        tensors.k[:, :, 1] *= torch.linspace(400, 1, 300).reshape(1, 300, 1)
        runs.append(emulated(rung, problem, tensors))
    (ours, _), (bare, report) = runs
    assert torch.equal(bare.o, ours.o)
    assert (set(bare.outputs), [buffer.names for buffer in bare.buffers][-1]) == ({"o"}, ("o",))
    assert report.bytes_written["global"] == bare.o.nbytes


# -- windows


def any_window(rung):
    """Both ends about the boundaries of tiles and blocks, each once on the left and once on the right."""
    for number, left in enumerate(BOUNDARIES[::3]):
        right = BOUNDARIES[-1 - 3 * number]
        emulated(rung, masked(seqlen_q=130 + number, seqlen_k=200, causal=False, window_left=left, window_right=right))


def rows_without_keys_in_a_window(rung):
    """The first tiles of all, the first rows of one, and whole warpgroups behind the last row."""
    problem = masked(num_heads=2, seqlen_q=500, seqlen_k=70, window_left=64)
    tensors, _ = emulated(rung, problem)
    assert not tensors.o[:, :430].any()
    assert (tensors.lse[:, :, :430] == -math.inf).all()
    assert tensors.lse[:, :, 430:].isfinite().all()


def a_window_wider_than_any_tensor(rung):
    emulated(rung, masked(seqlen_q=64, window_left=2**32))
    emulated(rung, masked(seqlen_q=64, causal=False, window_left=5, window_right=2**31 - 1))


def work_that_grows_with_the_window(rung):
    """A row's blocks are those of its window, its tile, and two more."""
    problem = masked(seqlen_q=256, seqlen_k=1024, window_left=95)
    artifact = built(rung, problem)
    report = on_emulator(artifact, problem, make_inputs(problem), race=False)
    blocks = 96 + artifact.config.block_m + 2 * artifact.config.block_n
    tiles = -(-256 // artifact.config.block_m) * artifact.config.block_m
    assert 0 < report.mma_flops <= tiles * min(blocks, 1024) * (4 * 64 + 2 * 8)


def what_is_beyond_the_window(rung):
    """It may be anything: row 0 sees the keys from `first` on; of V a block is read whole."""
    problem = masked(seqlen_q=100, seqlen_k=600, window_left=40)
    (clean, _), tensors, artifact = emulated(rung, problem), make_inputs(problem), built(rung, problem)
    first = 600 - 100 - 40
    tensors.k[:, :first] = math.nan
    tensors.v[:, : first // artifact.config.block_n * artifact.config.block_n] = math.nan
    on_emulator(artifact, problem, tensors)
    assert torch.equal(tensors.o, clean.o)


def scores_that_are_lost_in_a_window(rung):
    """Amid it and at both of its ends: they grow by far more than fp32 can hold."""
    climbing(rung, 200, causal=False, window_left=400, window_right=30)


# -- softcaps


def softcaps(rung):
    """Of scores of 1 nat and of 8; the log-sum-exp as precise as without."""
    for softcap, spread in ((1.0, 8.0), (30.0, 1.0), (30.0, 8.0), (500.0, 8.0)):
        emulated(rung, masked(seqlen_q=70, seqlen_k=150, softcap=softcap, softmax_scale=spread / 8))


def a_score_of_zero_however_steep_the_softcap_is(rung):
    for softcap, scale in ((1000.0, 2.0**127), (1e-20, 1e22)):
        problem = masked(seqlen_q=64, softcap=softcap, softmax_scale=scale)
        tensors = make_inputs(problem)
        tensors.k[:, 3:5] = 0
        emulated(rung, problem, tensors)


def lost_scores_under_a_softcap(rung):
    climbing(rung, 200, softcap=900.0)


# -- head_dims that are padded


def head_dims_between(rung):
    """The least and the largest that each padded one is for, in either type by turns."""
    for number, columns in enumerate(sorted(rung.supports.head_dim)):
        before = max((each for each in HEAD_DIMS if each < columns), default=0)
        for head_dim in {before + HEAD_DIM_STEP, columns - HEAD_DIM_STEP}:
            sizes = {"num_heads": 2, "num_heads_k": 1, "seqlen_q": 70, "seqlen_k": 150, "layout": "padded"}
            problem = masked(head_dim=head_dim, dtype=("bf16", "fp16")[number % 2], **sizes)
            assert rung.config_for(problem).head_dim == columns
            emulated(rung, problem)


def nothing_beyond_the_head_dim(rung):
    """Of slices of wider tensors: NaN behind the columns, the rows and the heads changes no bit."""
    problem = masked(head_dim=40, num_heads=2, seqlen_q=100, seqlen_k=130, layout="padded")
    (clean, _), tensors = emulated(rung, problem), make_inputs(problem)
    for buffer in tensors.buffers:
        kept = {name: view.clone() for name, view in buffer.views.items()}
        if not kept.keys() & problem.outputs:
            buffer.data.fill_(math.nan)
            for name, view in buffer.views.items():
                view.copy_(kept[name])
    on_emulator(built(rung, problem), problem, tensors)
    assert torch.equal(tensors.o, clean.o)
    assert torch.equal(tensors.lse, clean.lse)


def narrower_heads_with_all_else(rung):
    takes = rung.supports
    bounds = ({"window_left": 40} if takes.window else {}) | ({"softcap": 20.0} if takes.softcap else {})
    bounds |= {"alibi": True} if takes.alibi else {}
    sizes = {"num_heads": 2, "num_heads_k": 1, "head_dim": 24, "layout": "padded"}
    emulated(rung, masked(seqlen_q=90, seqlen_k=120, **sizes, **bounds))
    if takes.packed:
        emulated(rung, packed((70, 0, 33, 130), (20, 10, 33, 200), **sizes, **bounds))


def v_narrower_than_its_kernel(rung):
    """In a slice of a wider tensor: NaN behind the columns of V changes no bit."""
    sizes = {"head_dim": 64, "head_dim_v": 24, "num_heads": 2, "num_heads_k": 1, "layout": "padded"}
    problem = masked(seqlen_q=100, seqlen_k=130, **sizes)
    (clean, _), tensors = emulated(rung, problem), make_inputs(problem)
    (of_v,) = (buffer for buffer in tensors.buffers if "v" in buffer.views)
    kept = tensors.v.clone()
    of_v.data.fill_(math.nan)
    tensors.v.copy_(kept)
    on_emulator(built(rung, problem), problem, tensors)
    assert torch.equal(tensors.o, clean.o)


# -- head_dims apart


def v_narrower_than_q(rung):
    """The kernel's own head_dim_v and a narrower one, in either type; a tile after the other, and packed sequences."""
    for head_dim, head_dim_v in rung.supports.apart.items():
        of_heads = {"head_dim": head_dim, "num_heads": 2, "num_heads_k": 1}
        emulated(rung, masked(head_dim_v=head_dim_v, seqlen_q=200, seqlen_k=330, **of_heads), num_sms=1)
        narrower = of_heads | {"head_dim": head_dim - HEAD_DIM_STEP, "head_dim_v": 40, "dtype": "fp16"}
        emulated(rung, packed((70, 0, 33, 130), (20, 10, 33, 300), **narrower))


def places_of_q_and_blocks_where_v_is_narrower(rung):
    """With one place for Q the next tile's waits until O is stored; with two it does not."""
    for head_dim, head_dim_v in rung.supports.apart.items():
        problem = masked(head_dim=head_dim, head_dim_v=head_dim_v, num_heads=2, seqlen_q=200, seqlen_k=300)
        for config in ({"q_stages": 2, "block_n": 80, "q_in_registers": True}, {"block_m": 192, "block_n": 64}):
            emulated(rung, problem, num_sms=1, **config)


def v_of_other_widths(rung):
    """Each with a kernel of its own; and one that is padded to it."""
    for head_dim, head_dim_v in ((192, 128), (256, 64), (192, 72)):
        widths = {"head_dim": head_dim, "head_dim_v": head_dim_v}
        emulated(rung, masked(seqlen_q=130, seqlen_k=300, num_heads=2, num_heads_k=1, **widths), num_sms=1)


# -- sinks


def sinks_of_any_size(rung):
    """None at all, one beside which keys weigh nothing, one that weighs nothing, and a usual one.

    Rows that see no key have O = 0, and the sink as their log-sum-exp.
    """
    for dtype in ("bf16", "fp16"):
        problem = masked(num_heads=4, num_heads_k=2, seqlen_q=200, seqlen_k=120, sinks=True, dtype=dtype)
        tensors = make_inputs(problem)
        tensors.sinks.copy_(torch.tensor([-math.inf, 300.0, -300.0, 2.0]))
        emulated(rung, problem, tensors)
        assert not tensors.o[:, :80].any()
        blind = tensors.sinks[:, None].expand(4, 80)
        torch.testing.assert_close(tensors.lse[0, :, :80], blind, rtol=1e-6, atol=0)


def sinks_with_all_else(rung):
    """As gpt-oss has them: a window, grouped heads, packed sequences; with what else the rung takes, too."""
    bounds = {"window_left": 40, "num_heads": 4, "num_heads_k": 1, "sinks": True}
    emulated(rung, packed((70, 0, 33, 130), (20, 10, 33, 200), **bounds))
    alibi = {"alibi": True} if rung.supports.alibi else {}
    emulated(rung, masked(seqlen_q=90, seqlen_k=120, softcap=20.0, head_dim=24, layout="padded", **alibi, **bounds))


# -- ALiBi


def slopes_of_any_size_and_sign(rung):
    """Without a mask, the scores of a row far from the last key grow by 128 nats from block to block.

    NaNs stand behind the slopes, and the emulator knows their bounds.
    """
    for causal in (False, True):
        problem = masked(batch=2, num_heads=3, seqlen_q=200, seqlen_k=400, causal=causal, alibi=True)
        tensors = make_inputs(problem)
        tensors.alibi_slopes.copy_(torch.tensor([[-0.3, 0.0, 4.0], [0.5, 1.0, -0.01]]))
        emulated(rung, problem, tensors)


def slopes_of_packed_sequences(rung):
    """Each has its own; with all else that the rung takes."""
    bounds = {"window_left": 40, "softcap": 20.0, "alibi": True}
    emulated(rung, packed((70, 0, 33, 1, 130), (20, 10, 33, 0, 200), num_heads=2, num_heads_k=1, **bounds))


# -- dropout


def weights_that_are_dropped(rung):
    """With all else that goes with it, and tiles that begin within a square of the mask; lse is of all weights."""
    bounds = {"window_left": 90, "softcap": 20.0, "alibi": rung.supports.alibi}
    bounds |= {"batch": 2, "num_heads": 2, "num_heads_k": 1, "seqlen_q": 70, "seqlen_k": 150}
    for dropout_p, head_dim in ((0.004, 64), (0.3, 128), (0.99, 64)):
        emulated(rung, masked(dropout_p=dropout_p, head_dim=head_dim, **bounds))


def weights_that_are_dropped_of_whole_blocks(rung):
    """Of which no end and no mask cuts anything."""
    for head_dim, dtype in ((64, "bf16"), (96, "bf16"), (128, "bf16"), (128, "fp16"), (256, "bf16")):
        if head_dim in rung.supports.head_dim:
            sizes = {"seqlen_q": 140, "seqlen_k": 450, "num_heads": 2, "num_heads_k": 1}
            emulated(rung, masked(**sizes, causal=False, head_dim=head_dim, dtype=dtype, dropout_p=0.4))


def weights_that_are_dropped_in_packed_sequences(rung):
    """Each has a mask of its own, which begins with its first row and key; with all else that goes with it."""
    bounds = {"window_left": 90, "softcap": 20.0, "alibi": rung.supports.alibi, "dropout_p": 0.3}
    emulated(rung, packed((70, 0, 33, 1, 130), (20, 10, 33, 0, 200), num_heads=2, num_heads_k=1, **bounds))


def scores_that_climb_where_weights_are_dropped(rung):
    climbing(rung, 200, dropout_p=0.5)


OF_EACH = (rows_without_keys_and_hidden_keys, lengths_of_flash_attentions_tests, scores_that_climb)
OF_ALL = (*OF_EACH, more_tiles_than_ctas, softmax_scales, the_same_o_without_lse)
OF_FEATURES = {  # by its name in `supports`
    "window": (
        any_window,
        rows_without_keys_in_a_window,
        a_window_wider_than_any_tensor,
        work_that_grows_with_the_window,
        what_is_beyond_the_window,
        scores_that_are_lost_in_a_window,
    ),
    "softcap": (softcaps, a_score_of_zero_however_steep_the_softcap_is, lost_scores_under_a_softcap),
    "alibi": (slopes_of_any_size_and_sign, slopes_of_packed_sequences),
    "dropout": (
        weights_that_are_dropped,
        weights_that_are_dropped_of_whole_blocks,
        weights_that_are_dropped_in_packed_sequences,
        scores_that_climb_where_weights_are_dropped,
    ),
    "packed": (
        lengths_about_each_boundary,
        many_short_sequences,
        nothing_of_a_neighbour,
        rows_before_the_first_sequence,
        within_the_tensors_whatever_cu_seqlens_say,
        equal_lengths_are_a_batch,
    ),
    "narrower": (
        head_dims_between,
        nothing_beyond_the_head_dim,
        narrower_heads_with_all_else,
        v_narrower_than_its_kernel,
    ),
    "apart": (v_narrower_than_q, places_of_q_and_blocks_where_v_is_narrower),
    "head_dim_v": (v_of_other_widths,),
    "mods": OF_EXPRESSIONS,
    "sinks": (sinks_of_any_size, sinks_with_all_else),
    "rest": (zeros_behind_the_last_sequence,),
}


def cases(rungs, once=False, quick=None, only=None):
    """(check, rung) as a test's parameters: of each rung, what it says that it takes.

    `once`: of a feature only the first rung that takes it, and of all only what its loop decides. Tile after tile on
    one SM and random scales each has in test_configurations.py; outputs without lse, those that are launched.
    `quick`: the rungs whose checks of every rung are not slow; all others are. Else none is marked. `only`: of one
    feature.
    """
    found, taken = [], set()
    for rung in rungs:
        features = [name for name in OF_FEATURES if getattr(rung.supports, name) and name not in taken]
        taken.update(features if once else ())
        checks = [*(OF_EACH if once else OF_ALL), *(check for name in features for check in OF_FEATURES[name])]
        checks = OF_FEATURES[only] if only else checks
        for check in checks:
            marks = () if quick is None or (rung in quick and check in OF_ALL) else pytest.mark.slow
            found.append(pytest.param(check, rung, id=f"{id_of(rung)}-{check.__name__}", marks=marks))
    return pytest.mark.parametrize(("check", "rung"), found)
