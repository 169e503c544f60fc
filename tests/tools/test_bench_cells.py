"""`flashladder bench --cells` on a stand-in for a GPU: small cells of the backward ladder."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from flashladder.common import catalog, console
from flashladder.common.catalog.ladder import Cells, Ladder
from flashladder.common.errors import ConfigError
from flashladder.common.measure import baselines, cells, contest
from flashladder.common.measure.baselines import backward
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.records import cell_results, records
from flashladder.common.records.log import Schema
from flashladder.common.records.schemas import BENCH
from flashladder.tests.support import fake_gpu
from flashladder.tools.commands import bench

SMALL = {"head_dim": 64, "num_heads": 1}
CELLS = {
    "plain": Cells(cases={"d64": SMALL}, causal=(True,), seqlens=(64, 128)),
    "packed": Cells(cases={"same bits": {**SMALL, "deterministic": True}}, causal=(False,), mixes=("spread",)),
}
OFFICIAL_US = {"fa2": 100.0, "fa4": 60.0}  # ours takes 80


def official(_, problem, tensors, us, calls, wrong=False):
    def launch():
        calls.append((us, problem))
        found = problem.asked.compute(problem, tensors.by_name, torch.float32)
        return backward.Gradients(**{name: (1 + wrong) * x.to(torch.bfloat16) for name, x in found.items()})

    launch.time_us = us
    return launch


@pytest.fixture
def calls():
    """Of official kernels, by their times, with the problems."""
    return []


@pytest.fixture
def run(monkeypatch, tmp_path, capsys, calls):
    """Calls the tool; gives its exit code, and in a line each what it printed."""
    fake_gpu.install(monkeypatch)
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    monkeypatch.setattr(fake_gpu, "RIGHT", {rung.name for rung in catalog.versions(ladder="backward")})
    monkeypatch.setattr(cells, "ladder_of", lambda name: Ladder(operations=(name,), cells=CELLS))
    monkeypatch.setattr(cells, "TOKENS", 128)
    monkeypatch.setattr(cells.packing, "lengths", lambda mix, tokens: (tokens - 7, 7))
    monkeypatch.setattr(contest, "warm", partial(contest.warm, device="cpu"))
    for name, us in OFFICIAL_US.items():
        bind = partial(official, us=us, calls=calls)
        monkeypatch.setitem(backward.BASELINES, name, replace(backward.BASELINES[name], module="math", bind=bind))
    monkeypatch.setitem(backward.BASELINES, "cudnn", replace(backward.BASELINES["cudnn"], module="no_such_module"))

    def call(*words):
        code = console.run(bench.main, bench.parser(), [*words, "--rounds", "4"])
        captured = capsys.readouterr()
        return code, " ".join(captured.out.split()), " ".join(captured.err.split())

    return call


def test_what_calls_launch_beside_all_that_is_installed(run, calls):
    code, out, err = run("backward", "--cells", "all")
    assert code == 0, err
    assert "3 problems, after 2 kernels that official libraries compile first: about 35 s" in out
    assert [us for us, _ in calls[:2]] == [60.0, 60.0], "what is compiled comes before anything is timed"
    assert {problem.packed for _, problem in calls[:2]} == {True, False}
    assert "1 of 3: plain: d64, causal, 64" in out
    assert "3 of 3: packed: same bits, full, spread" in out
    assert re.search(r"all rung backward/20 3 0\.7\d+ 0\.7\d+ ", out), out
    rows, damaged = records.bench("backward_h100").read()
    assert damaged == []
    assert list(rows["version"]) == ["fa2", "fa4", "backward/20_a_tile_late"] * 3
    assert list(rows["group"]) == ["plain"] * 6 + ["packed"] * 3
    assert list(rows["mix"]) == [""] * 6 + ["spread"] * 3
    samples, damaged = records.samples(rows["run"].iloc[0]).read()
    assert damaged == []
    assert samples["problem"].nunique() == 3
    found = cell_results.results(cell_results.latest(rows))
    assert [(each.group, each.size, each.official) for each in found] == [
        ("plain", "64", "fa4"),
        ("plain", "128", "fa4"),
        ("packed", "spread", "fa4"),
    ]
    assert [each.ratio() for each in found] == pytest.approx([0.75] * 3, rel=0.01)


def test_cells_of_a_reference(run):
    code, _, err = run("c", "--device", "cpu", "--cells", "plain")
    assert code == 0, err
    assert "c" in {*records.bench("forward_h100").read()[0]["version"]}


def test_a_wrong_official_kernel_is_left_out_and_named(run, monkeypatch, calls):
    bind = partial(official, us=60.0, calls=calls, wrong=True)
    monkeypatch.setitem(backward.BASELINES, "fa4", replace(backward.BASELINES["fa4"], bind=bind))
    code, out, err = run("backward", "--cells", "plain")
    assert code == 0, err
    assert "no baseline fa4: FlashAttention-4 is wrong at batch=2,num_heads=1,seqlen_q=64" in err
    assert re.search(r"all rung backward/20 2 1\.2\d+ 1\.2\d+ d64, causal, ", out), out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cells", "plan"], "no group of cells plan; did you mean plain? There are plain, packed, all"),
        (["--cells", "plain", "--causal", "yes", "--no-lse"], "leave out --causal, --no-lse"),
        (["--cells", "plain", "--baselines", "fa3"], "no baseline fa3"),
    ],
)
def test_what_is_refused(run, words, message):
    code, _, err = run("backward", *words)
    assert code == console.EXIT_ERROR
    assert message in err


def test_a_ladder_without_cells():
    with pytest.raises(ConfigError, match="the operation append has no cells in its ladder"):
        cells.cells("append", ["all"])


@pytest.mark.parametrize("operation", ["forward", "packed", "backward", "decode", "mla"])
def test_a_log_takes_what_cells_are_called(operation):
    """A reader leaves out a row with a cell that its column does not take."""
    columns = {name: BENCH.columns[name] for name in ("group", "case", "mix")}
    for cell in cells.cells(operation, [cells.ALL]):
        named = {name: getattr(cell, name) for name in columns if getattr(cell, name)}
        assert Schema(columns).validate(named) == named


@pytest.mark.parametrize("operation", ["forward", "packed", "decode", "mla"])
def test_cells_of_other_ladders(operation):
    found = cells.cells(operation, [cells.ALL])
    assert {cell.problem.operation for cell in found} == {operation}
    assert len({cell.problem for cell in found}) == len(found), "bench times a problem once"
    places = [(cell.group, cell.case, cell.problem.causal, cell.mix or cell.problem.seqlen_k) for cell in found]
    assert len(set(places)) == len(places)
    for cell in found:
        catalog.choice(cell.problem, catalog.Card("sm_90a", load_gpu("h100")))
    wanted = "cold_graph" if operation in ("decode", "mla") else "hot"
    assert {cell.mode for cell in found if cell.group != "prompts"} == {wanted}


def test_sequences_as_they_are_listed():
    found = {cell.mix: cell.problem for cell in cells.cells("decode", ["mixed rows"])}
    problem = found["32 of 1 and 2 of 512 over 4k"]
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (34, 32 + 1024, 4096)
    assert problem.seqlens_q == (1,) * 32 + (512, 512)
    assert problem.seqlens_k == (4096,) * 34


def test_a_list_of_sequences_in_another_form(monkeypatch):
    listed = Ladder(
        operations=("decode",), cells={"odd": Cells(cases={"x": {"packed_q": True}}, rows={"y": ("8 x 4",)})}
    )
    monkeypatch.setattr(cells, "ladder_of", lambda _: listed)
    with pytest.raises(ConfigError, match="rows 8 x 4: sequences are listed as COUNT x ROWS of KEYS"):
        cells.cells("decode", ["odd"])


def test_cells_of_the_backward_ladder_are_problems_that_its_calls_take():
    found = cells.cells("backward", [cells.ALL])
    assert len({cell.problem for cell in found}) == len(found) > 100
    assert all(cell.problem.batch * cell.problem.seqlen_q == cells.TOKENS for cell in found if not cell.mix)
    assert {sum(cell.problem.seqlens_q) for cell in found if cell.mix} == {cells.TOKENS}
    card = catalog.Card("sm_90a", load_gpu("h100"))
    for cell in found:
        assert catalog.choice(cell.problem, card)[0].instruction_set == "hopper", cell.title
    assert next(cell.title for cell in found if cell.problem.packed) == "packed: d128, full, equal"


def test_kernels_that_are_compiled_are_told_apart_by_what_they_know():
    fa4 = replace(baselines.find("fa4", "backward"), module="math", refuses=lambda _: None, arches=(0,))
    sizes = {"operation": "backward", "num_heads": 8}
    problems = [
        Problem(**sizes, seqlen_q=4096),
        Problem(**sizes, seqlen_q=64, batch=2),
        Problem(**sizes, num_heads_k=4, seqlen_q=64),
        Problem(**sizes, num_heads_k=2, seqlen_q=64),
        Problem(**sizes, causal=True, seqlen_q=64),
    ]
    plain = replace(fa4, compiles=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda: (0, 0))
        assert {problem for _, problem in contest.to_warm([plain, fa4], problems)} == {*problems[1:]}
