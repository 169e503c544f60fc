"""Warps that lag: what shows only where a warp is stopped at a synchronisation that it need not wait for."""

import pytest
import torch
from lanes import run_lanes

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.errors import EmulatorError
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

LAST = [version for version in catalog.finished() if version.instruction_set == "hopper"][-2:]
FULL, EMPTY, GO, GO_ON, STAGE = "bar", "bar+8", "bar+16", "bar+24", "bar+32"


def wait(barrier):
    return f"{{ again: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], 0; @!done bra again; }}"


def arrive(barrier):
    return f"mbarrier.arrive.shared::cta.b64 _, [{barrier}];"


# By warp. Warp 0 puts a word into a stage twice, warp 1 reads the first one, warp 2 gives the stage back, and again:
# two arrivals are what EMPTY awaits, whose they are it cannot tell. Warp 1 lets warp 2 do both before it reads itself.
GIVEN_BACK_TWICE = [
    f"st.shared.b32 [{STAGE}], 1; {arrive(FULL)} {wait(EMPTY)} st.shared.b32 [{STAGE}], 2;",
    f"{wait(FULL)} {arrive(GO)} {arrive(GO_ON)} ld.shared.b32 found, [{STAGE}]; {arrive(EMPTY)}",
    f"{wait(GO)} {arrive(EMPTY)} {wait(GO_ON)} {arrive(EMPTY)}",
]
# Warp 1 asks whether the word has come, and reads it whatever the answer.
ASKED_FOR_NOTHING = [
    f"st.shared.b32 [{STAGE}], 1; {arrive(FULL)}",
    f"""mbarrier.test_wait.parity.shared::cta.b64 done, [{FULL}], 0; @!done mov.u32 found, 5;
        ld.shared.b32 found, [{STAGE}];""",
    "",
]


def run(warps, lagging):
    """What warp 1 finds; one lane of each warp goes its way."""
    ways = "".join(f"setp.eq.u32 p, tid, {32 * n}; @!p bra after{n}; {way} after{n}:" for n, way in enumerate(warps))
    made = " ".join(
        f"mbarrier.init.shared::cta.b64 [{barrier}], {count};"
        for barrier, count in ((FULL, 1), (EMPTY, 2), (GO, 1), (GO_ON, 1))
    )
    code = f"""mov.u32 tid, %tid.x; mov.u32 bar, buffer; mov.u32 found, 0;
        setp.eq.u32 p, tid, 0; @!p bra made; {made} made: bar.sync 0; {ways}"""
    outputs, _ = run_lanes(
        code, {}, {"found": "u4"}, registers=".reg .pred p, done; .reg .b32 tid, bar;", num_threads=96,
        declarations=".shared .align 8 .b8 buffer[64];", lagging=lagging,
    )  # fmt: skip
    return outputs["found"][32]


@pytest.mark.parametrize(("warps", "lagging"), [(GIVEN_BACK_TWICE, (1,)), (ASKED_FOR_NOTHING, (0,))])
def test_what_shows_only_where_a_warp_lags(warps, lagging):
    assert run(warps, ()) == 1
    with pytest.raises(EmulatorError):
        run(warps, lagging)


@pytest.mark.parametrize("version", LAST, ids=lambda version: version.name)
@pytest.mark.slow
def test_rungs_do_not_mind(version):
    """Whichever warpgroup lags, nothing is reported, and O is the same bit for bit. All rungs: test_mutations.py."""
    smallest = {name: min(version.choices[name].values) for name in ("block_m", "block_n")}
    sizes = {"seqlen_q": 2 * smallest["block_m"], "seqlen_k": 5 * smallest["block_n"]}
    problem = Problem(num_heads=1, head_dim=min(version.supports.head_dim), **sizes)
    artifact = translate(version, version.config_for(problem, **smallest), "sm_90a")
    outputs = []
    for first in range(0, artifact.launch.num_threads // 32 + 1, 4):
        tensors = make_inputs(problem)
        on_emulator(artifact, problem, tensors, lagging=range(first, first + 4))
        outputs.append(tensors.o.clone())
    assert all(torch.equal(outputs[0], each) for each in outputs[1:])
