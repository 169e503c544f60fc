"""The family of inputs that is a recording: its file, and what becomes of rows, heads and columns beyond it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flashladder.common import errors
from flashladder.common.paths import TRAINED
from flashladder.common.problem.families import recording
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import DTYPES, Problem
from flashladder.tests.support.designed import drawn_by

LAYERS, HEADS, TOKENS, COLUMNS = 2, 3, 5, 4
SCALED = 2.0**-60, 2.0**-9, 0.125, 2.0**9, 2.0**60
WIDER = {"num_heads": 8, "num_heads_k": 8, "seqlen_q": 7, "seqlen_k": 12, "head_dim": 10}
SHARED = {"num_heads": 6, "num_heads_k": 2, "seqlen_q": 12, "seqlen_k": 7, "head_dim": 4, "head_dim_v": 3}
ONE_ROW = {"num_heads": 4, "num_heads_k": 1, "seqlen_q": 1, "seqlen_k": 3, "head_dim": 3}


@pytest.fixture
def file(tmp_path):
    """Whose numbers are 0, 1, 2, ... 119 in q, less in k, and halves in v."""
    numbers = torch.arange(LAYERS * HEADS * TOKENS * COLUMNS).reshape(LAYERS, HEADS, TOKENS, COLUMNS)
    recording.write(tmp_path / "new" / "file.npz", numbers, -numbers, numbers / 2)
    return tmp_path / "new" / "file.npz"


def filled(file, **options):
    """A problem and its inputs."""
    return drawn_by([lambda sketch: recording.fill(sketch, recording.read(file))], **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [WIDER, SHARED, ONE_ROW])
def test_heads_tokens_and_columns_go_round(file, sizes, dtype):
    problem, tensors = filled(file, **sizes, dtype=dtype)
    group, later = problem.num_heads // problem.num_heads_k, problem.seqlen_k - problem.seqlen_q
    first = int(-tensors.k[0, 0, 0, 0]) // (TOKENS * COLUMNS)

    def number(head, token, column):
        head = (first + head + column // COLUMNS) % (LAYERS * HEADS)
        return (head * TOKENS + token % TOKENS) * COLUMNS + column % COLUMNS

    for (row, head, column), found in np.ndenumerate(tensors.q[0].float().numpy()):
        assert found == number(head // group, row + later - head % group, column)
    for (key, head, column), found in np.ndenumerate(tensors.k[0].float().numpy()):
        assert found == -number(head, key, column)
    for (key, head, column), found in np.ndenumerate(tensors.v[0].float().numpy()):
        assert found == number(head, key, column) / 2


def test_sequences_begin_with_different_heads(file):
    design = [lambda sketch: recording.fill(sketch, recording.read(file))]
    _, tensors = drawn_by(12 * design, **ONE_ROW)
    assert len({float(sequence[0, 0, 0]) for sequence in tensors.k}) > 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_do_not_depend_on_the_scale(dtype):
    """Those of the model, where softmax_scale is 1/sqrt(head_dim); fp16 has no room for the extremes."""
    problem = Problem(head_dim=64, seqlen_q=40, family="trained", dtype=dtype)
    usual = scores_of(problem)
    for scale in SCALED if dtype == "bf16" else SCALED[1:-1]:
        assert (scores_of(replace(problem, softmax_scale=scale)) - usual).abs().max() < 0.02 * usual.abs().max()


def scores_of(problem):
    tensors = make_inputs(problem)
    return problem.softmax_scale * tensors.q[0, :, 0].double() @ tensors.k[0, :, 0].double().T


def test_numbers_are_the_recorded_ones():
    """Where nothing has to be converted, to the bit."""
    recorded = recording.read()
    count, tokens, columns = recorded["k"].shape
    tensors = make_inputs(Problem(seqlen_q=tokens, head_dim=columns, family="trained"))
    number = next(i for i in range(count) if torch.equal(recorded["k"][i], tensors.k[0, :, 0]))
    for name in ("q", "v"):
        assert torch.equal(recorded[name][number], getattr(tensors, name)[0, :, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("operation", "options"),
    [
        ("backward", {"num_heads": 4, "num_heads_k": 2, "seqlen_q": 20, "causal": True}),
        ("decode", {"num_heads": 8, "num_heads_k": 2, "seqlen_q": 1, "seqlens_k": (3, 300)}),
        ("decode", {"seqlen_q": 2, "seqlens_k": (0, 70), "options": {"paged": True, "new_keys": True}}),
        ("decode", {"seqlen_q": 1, "seqlens_k": (9,), "options": {"fp8_cache": True}}),
    ],
)
def test_every_operation_with_families_has_it(operation, options, dtype):
    problem = Problem(operation=operation, family="trained", dtype=dtype, **options)
    tensors = make_inputs(problem)
    exact = problem.asked.compute(problem, tensors.by_name, torch.float64)
    assert all(output.isfinite().all() for name, output in exact.items() if name != "lse")
    assert tensors.q.isfinite().all()
    assert tensors.q.std() > 0


# The file


def test_an_existing_file_is_not_lost(file):
    before = file.read_bytes()
    with pytest.raises(errors.ResultsError, match=r"cannot write .*file\.npz: File exists"):
        recording.write(file, *torch.ones(3, 1, 1, 1, 1))
    assert file.read_bytes() == before


def halves(**changes):
    """Arrays of a file, with changes; those that are None are left out."""
    arrays = dict.fromkeys("qkv", np.zeros((1, 1, 2, 3), np.uint16)) | changes
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (halves(k=None), "k is not a file in the archive"),
        (halves(v=np.zeros((1, 1, 2, 3), np.float32)), r"float32 \(1, 1, 2, 3\)"),
        (halves(q=np.zeros((1, 1, 2, 4), np.uint16)), r"uint16 \(1, 1, 2, 4\), uint16 \(1, 1, 2, 3\)"),
        (dict.fromkeys("qkv", np.zeros((2, 3), np.uint16)), r"arrays of the shape \(2, 3\)"),
        (dict.fromkeys("qkv", np.zeros((1, 0, 2, 3), np.uint16)), r"arrays of the shape \(1, 0, 2, 3\)"),
        (halves(q=np.full((1, 1, 2, 3), 0x7F80, np.uint16)), "NaN or infinity"),
    ],
)
def test_a_file_of_other_arrays_is_refused(tmp_path, arrays, reason):
    np.savez_compressed(tmp_path / "other.npz", **arrays)
    refused(tmp_path / "other.npz", reason)


def test_a_damaged_file_is_refused(tmp_path, file):
    whole = file.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "nothing": b"",
        "text": b"q k v",
        "half": whole[:middle],
        "changed": whole[:middle] + bytes(20) + whole[middle + 20 :],
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name)
    np.save(tmp_path / "one.npy", np.zeros((1, 1, 2, 3), np.uint16))
    refused(tmp_path / "one.npy")
    refused(tmp_path / "absent.npz", "No such file")


def refused(path, reason=""):
    message = f"{path.name} is no recording of q, k and v, each .* of uint16: .*{reason}.*train --record FILE`"
    with pytest.raises(errors.ResultsError, match=message):
        recording.read(path)


def test_it_is_small():
    assert TRAINED.stat().st_size < 1.5e6
