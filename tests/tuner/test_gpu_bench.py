"""The bench of a GPU: a stand-in runs kernels on the emulator, and makes up their times."""

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.compiler import build_one
from flashladder.common.errors import DeviceError, VerificationError
from flashladder.common.measure import contest
from flashladder.common.measure.timing import CONTROL
from flashladder.common.problem.problem import Problem
from flashladder.tests.support import fake_gpu
from flashladder.tuner.gpu_bench import OPPONENT, OnGpu, opponents


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")


class TestGpuBench:
    """The bench of a GPU; the stand-in runs kernels on the emulator, and makes up their times."""

    PROBLEM = Problem(batch=1, num_heads=1, seqlen_q=128)

    @pytest.fixture
    def artifacts(self):
        version = catalog.find("02")
        configs = [version.config(), version.config(q_fragments=2)]
        return {str(number): (build_one(version, config, "sm_90a"),) for number, config in enumerate(configs)}

    @pytest.fixture
    def bench(self, monkeypatch):
        fake_gpu.install(monkeypatch)
        made = OnGpu("h100", "hot")()
        made.prepare(self.PROBLEM)
        return made

    def test_kernels_are_timed_beside_the_official_one(self, bench, artifacts):
        comparison = bench.compare((self.PROBLEM,), artifacts, 6)
        (times,) = comparison.times
        assert times.keys() == {OPPONENT, "0", "1", CONTROL}
        assert comparison.baseline == OPPONENT
        assert {len(each) for each in times.values()} == {6}
        assert comparison.medians("0")[0] == pytest.approx(80, rel=0.01)
        assert bench.place()["device"] == fake_gpu.NAME

    def test_ours_alone_are_timed_beside_the_first(self, artifacts, monkeypatch):
        fake_gpu.install(monkeypatch)
        bench = OnGpu("h100", "hot", alone=True)()
        bench.prepare(self.PROBLEM)
        comparison = bench.compare((self.PROBLEM,), artifacts, 4)
        assert (comparison.baseline, comparison.control) == ("0", CONTROL)
        assert comparison.times[0].keys() == {"0", "1", CONTROL}

    def test_the_place_can_be_written_beside_a_winner(self, bench):
        winners.save("h100", "02_swizzling", "kind", {"block_n": 32}, bench.place())
        (winner,) = winners.of_gpu("h100")
        assert winner.evidence["torch"] == torch.__version__

    def test_the_tensors_are_made_once(self, bench, artifacts, monkeypatch):
        monkeypatch.setattr(contest, "make_inputs", lambda *_: pytest.fail("made again"))
        bench.prepare(self.PROBLEM)
        bench.compare((self.PROBLEM,), artifacts, 2)

    def test_a_wrong_kernel(self, bench, artifacts, monkeypatch):
        monkeypatch.setattr(contest, "on_gpu", lambda artifact, task, tensors: lambda: tensors.o.zero_())
        with pytest.raises(VerificationError, match="0 is wrong"):
            bench.compare((self.PROBLEM,), artifacts, 2)

    def test_another_gpu(self, monkeypatch):
        fake_gpu.install(monkeypatch)
        with pytest.raises(DeviceError, match=r"the GPU here is NVIDIA H100.*, not a100: .*--gpu here, .*--offline"):
            OnGpu("a100", "hot")()

    def test_without_the_official_kernel(self, monkeypatch):
        fake_gpu.install(monkeypatch)
        bench = OnGpu("h100", "hot")()
        monkeypatch.setattr("flashladder.common.measure.baselines.Baseline.missing", lambda self: "it is not installed")
        with pytest.raises(DeviceError, match="nothing to compare with: it is not installed"):
            bench.prepare(self.PROBLEM)

    def test_without_a_kernel_of_others_a_rung_is_the_opponent(self, artifacts, monkeypatch):
        """That which calls launch last: rivals are held against the same one."""
        fake_gpu.install(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr("flashladder.common.measure.baselines.Baseline.missing", lambda self: "it is not installed")
        last = catalog.ladder_of("forward").launches[-1].rung
        assert opponents([self.PROBLEM, self.PROBLEM]) == last
        bench = OnGpu("h100", "hot")()
        bench.prepare(self.PROBLEM)
        comparison = bench.compare((self.PROBLEM,), artifacts, 2)
        assert comparison.baseline == OPPONENT
        assert comparison.times[0].keys() == {OPPONENT, "0", "1", CONTROL}

    def test_without_a_graph_of_the_official_kernel(self, bench, artifacts, monkeypatch):
        held = contest.Contest(self.PROBLEM, {}, {"fa2": "fa2 cannot be captured"}, None)
        monkeypatch.setattr(contest.Arena, "hold", lambda *_: held)
        with pytest.raises(DeviceError, match="nothing to compare with: fa2 cannot be captured"):
            bench.compare((self.PROBLEM,), artifacts, 2)
