"""The cost model against an H200: the rungs of mma.sync, in the order in which they were timed."""

import numpy as np
import pytest
from test_tuner_model import H100, workload

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build, sass
from flashladder.common.compiler.sass.occupancy import SUB_CORES
from flashladder.common.paths import PUBLISHED
from flashladder.common.predict.agreement import rank_correlation
from flashladder.common.predict.cost import MainLoop
from flashladder.common.predict.limits.predicted import PASSES
from flashladder.common.predict.subcore import BESIDE_MMA, cycles
from flashladder.common.records import records

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def timed_ladder():
    """The rungs of mma.sync, each in the configuration in which it was timed on an H200, and the times."""
    frame, _ = records.ladder("h200", folder=PUBLISHED).read()
    frame = frame[(frame["kind"] == "own") & (frame["dtype"] == "bf16") & (frame["seqlen_q"] == 4096)]
    ampere = [version.name for version in catalog.versions() if version.instruction_set == "ampere"]
    frame = frame[frame["version"].isin(ampere) & (frame["version"] >= "02")]
    latest = frame.sort_values("time").drop_duplicates("version", keep="last")
    assert len(latest) >= 23
    rungs = [(catalog.find(row.version), row.config) for row in latest.itertuples()]
    built = build([BuildRequest(version, version.parse_config(config), H100.arch) for version, config in rungs])
    return built, list(1 / latest["ratio"])


def test_the_rungs_rank_as_the_ladder_has_them(timed_ladder):
    """As README.md says."""
    built, measured = timed_ladder
    predicted = [workload(artifact).cycles() for artifact in built]
    assert rank_correlation(predicted, measured) > 0.8
    assert np.std(np.log(predicted) - np.log(measured)) < 0.06


def test_what_others_cost_beside_mmas_and_more_passes_make_the_model_better(timed_ladder):
    """As README.md says of `flashladder explain`."""
    built, measured = timed_ladder
    predicted = []
    for artifact in built:
        loop, resident = MainLoop.of(artifact), sass.occupancy(artifact, H100).ctas
        rates, finer = sass.throughput(H100), {"beside_mma": BESIDE_MMA, "passes": PASSES}
        spent = cycles(loop.steps, resident, loop.warps // SUB_CORES, rates, **finer)
        tile = artifact.launch.block_m * artifact.launch.block_n
        predicted.append(spent / resident / loop.blocks / tile)
    assert rank_correlation(predicted, measured) > 0.9
    assert np.std(np.log(predicted) - np.log(measured)) < 0.04
