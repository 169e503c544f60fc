"""The tuner on a real GPU (`pytest -m gpu`): kernels that are wrong, fault or hang do not end a search."""

import pytest

from flashladder.common import catalog, console
from flashladder.common.catalog import winners
from flashladder.common.problem.problem import Problem
from flashladder.common.records.received import problem_named
from flashladder.common.runtime import target
from flashladder.tests.support.tiny_ladder import make_rung
from flashladder.tools.commands import search
from flashladder.tuner import campaign, job, trial_log
from flashladder.tuner.candidates import compile_all
from flashladder.tuner.space import Space

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

PROBLEM = Problem(batch=2, num_heads=3, seqlen_q=256)
YAML = """
title: Ill-behaved
idea: What q_fragments decides here is what goes wrong.
instruction_set: ampere
supports: {dtype: [bf16], head_dim: [128], seqlen_q: block_m, seqlen_k: block_n}
config:
  block_m: {default: 64, values: [64]}
  block_n: {default: 64, values: [64]}
  num_warps: {default: 4, values: [4]}
  q_fragments: {default: 0, values: [0, 2, 4, 8]}
  k_fragments: {default: 0, values: [0, 2]}
  v_fragments: {default: 0, values: [0]}
"""
VERDICTS = {0: "measured", 2: "wrong", 4: "faulted", 8: "hung"}  # by q_fragments
MISBEHAVE = """
    if constexpr (q_fragments == 2) return;
    if constexpr (q_fragments == 4) *reinterpret_cast<volatile int *>(16) = 0;
    if constexpr (q_fragments == 8) for (auto begin = clock64(); clock64() - begin < 40'000'000'000;) continue;
"""
PATIENCE_SECONDS = 6


@pytest.fixture
def space(tmp_path):
    """Rung 02 with some misfortune on the way in."""
    head, brace, body = catalog.find("02").kernel.read_text().partition("params) {\n")
    assert brace
    rung = make_rung(tmp_path / "ladder", yaml=YAML, kernel=head + brace + MISBEHAVE + body)
    return Space.of(rung, (PROBLEM,), only={"ptxas_level": (3,)})


def test_the_search_goes_on_after_kernels_that_are_wrong_fault_and_hang(space, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    gpu = target.resolve("gpu", None).gpu
    task = job.Job(space, gpu, job.SearchSettings(exhaustive=True))
    assert campaign.run([task], job.workers("1", gpu, "hot", PATIENCE_SECONDS)) == 0
    frame, _ = trial_log.read(trial_log.path_of(task.study)).read()
    found = {row.config: row.verdict for row in frame.itertuples()}
    assert found == {
        config.name: VERDICTS[config.q_fragments]
        for kernel in compile_all(space, gpu).kernels
        for config in [kernel.config]
    }
    assert len(found) > len(VERDICTS)
    (winner,) = winners.of_gpu(gpu.name)
    assert winner.values["q_fragments"] == 0


@pytest.mark.parametrize(
    ("rung", "fields"),
    [
        ("decode/13", ["block_n=64", "num_warps=4", "num_stages=3", "ctas_per_sm=2", "cluster_size=4,8"]),
        ("mla/06", ["cluster_size=4,8"]),
        ("backward/18", ["block_m=64"]),
    ],
)
def test_the_other_ladders_are_tuned(rung, fields, monkeypatch, tmp_path, capsys):
    """On a Hopper, in the mode of their ladder; what is not installed is no opponent."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    version, here = catalog.find(rung), target.resolve("gpu", None)
    if not version.runs_on(here.arch):
        pytest.skip(f"{rung} does not run on {here.arch}")
    sizes = ["--seqlens", "1024", *([] if rung.startswith("backward") else ["--batch", "1"])]
    asked = [rung, "--gpu", "here", *sizes, "--family", "normal", "--only", "ptxas_level=3", *fields]
    code = console.run(search.main, search.parser(), asked)
    assert code == 0, capsys.readouterr().err
    (winner,) = winners.of_gpu(here.gpu.name)
    problem = problem_named(winner.evidence["problems"][0])
    assert winners.config(version, here.gpu.name, problem).as_dict().items() >= winner.values.items()
    assert winner.evidence["timing"] == catalog.ladder_of(version.operation).search.mode
