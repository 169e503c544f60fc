"""Why a rung is slow: what is predicted of each rung of the ladder, what samples of a GPU say, and the command."""

import re

import numpy as np
import pytest

from flashladder.common import catalog
from flashladder.common.catalog import LIMITERS
from flashladder.common.compiler import build_one
from flashladder.common.compiler.sass import read
from flashladder.common.console import EXIT_ERROR
from flashladder.common.console import run as run_tool
from flashladder.common.errors import ConfigError, DeviceError, ToolchainError
from flashladder.common.paths import ROOT
from flashladder.common.predict.limits import predict, sample
from flashladder.common.predict.limits.diagnosis import CYCLES, Diagnosis
from flashladder.common.predict.limits.kinds import limit_of
from flashladder.common.predict.limits.predicted import without
from flashladder.common.predict.ncu import Counted, Profile, find_ncu
from flashladder.common.predict.profiling import ProfiledRung
from flashladder.common.predict.subcore import Step
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.report import diagnosis, difference
from flashladder.tests.support import fake_ncu
from flashladder.tests.support.tiny_ladder import VERSION_YAML, make_rung
from flashladder.tools.commands import explain as tool

pytestmark = pytest.mark.slow

H100 = load_gpu("h100")
WOVEN = {"softmax", "fragment_loads", "copies"}  # what the upper rungs fight against, in turns
# Of each rung: what costs most, and the rungs whose idea may be named against it.
EXPECTED = {
    "01": ({"bank_conflicts"}, {"02"}),
    "02": ({"copies"}, {"03"}),
    "03": ({"fragment_loads"}, {"04"}),
    "04": ({"fragment_loads"}, {"05"}),
    **{f"{number:02}": ({"fragment_loads"}, {"09"}) for number in range(5, 9)},
    **{f"{number:02}": ({"softmax"}, {"17"}) for number in range(9, 17)},
    "17": (WOVEN, {"18", "19", "22"}),
    "18": (WOVEN, {"19", "21", "22"}),
    "19": (WOVEN, {"20", "21", "22"}),
    "20": (WOVEN, {"21", "22"}),
    "21": (WOVEN, {"22"}),
    "22": (WOVEN, set()),
    "35": ({"softmax"}, {"37"}),
    "37": ({"softmax"}, {"40"}),
    "40": ({"softmax"}, {"48"}),
}


def diagnosed(number):
    version = catalog.find(number)
    return predict(version, build_one(version, version.config(H100), H100.arch), H100)


@pytest.mark.parametrize("number", EXPECTED)
def test_every_rung_names_the_idea_of_a_later_one_or_says_that_it_cannot(number):
    found = diagnosed(number)
    limiters, ideas = EXPECTED[number]
    assert found.limiter.name in limiters
    assert [found.gain(limit) for limit in found.limits] == sorted(map(found.gain, found.limits), reverse=True)
    assert found.tensor < found.time
    assert found.limiter.lines
    assert all(place.file == str(found.version.kernel) for place, _ in found.limiter.lines)
    said = "\n".join(diagnosis.report(found))
    if ideas:
        named = found.ideas(found.advice)[0]
        assert named.number in ideas
        assert named.number > number
        assert diagnosis.page(named) in said
        assert (ROOT / diagnosis.page(named)).exists()
    else:
        assert found.advice is None
        assert "No later rung of this ladder has an idea against it" in said


def test_the_limiters_are_those_that_rungs_address():
    assert {name for version in catalog.versions() for name in version.addresses} == set(LIMITERS)


def test_an_unknown_limiter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"addresses=speed is not one of scalar_products, bank_conflicts"):
        make_rung(tmp_path, yaml=VERSION_YAML + "addresses: [speed]\n")


def test_a_conflict_free_rung_is_what_rung_01_is_predicted_to_be_without_conflicts():
    conflicts = diagnosed("01").limiter
    assert conflicts.without == pytest.approx(diagnosed("02").time, rel=0.25)


def test_what_a_left_out_instruction_waited_for_the_next_one_waits_for():
    loop = read(build_one(catalog.find("02"), catalog.find("02").config(), "sm_90a")).usual_loop
    part = [instruction for instruction in loop if limit_of(instruction, True) == "softmax"]
    steps = without(loop, part)
    assert 0 < len(part) == len(loop) - len(steps)
    waiting = np.bitwise_or.reduce([step.waits for step in steps])
    assert waiting == np.bitwise_or.reduce([Step.of(instruction).waits for instruction in loop])
    assert without(loop, []) == [Step.of(instruction) for instruction in loop]


# Samples of a GPU


def sampled(number, stalls_of, wavefronts=1):
    """The diagnosis of a rung at whose instructions `stalls_of` says what ncu found."""
    version = catalog.find(number)
    code = read(build_one(version, version.config(), "sm_90a"))
    counted = []
    for instruction in code.instructions:
        stalls = stalls_of(instruction)
        counted.append(Counted(instruction.text, 1, wavefronts, 1, 0, 0, sum(stalls.values()), stalls))
    profile = Profile(tuple(counted), {"gpu__time_duration.sum": 1e6}, "NVIDIA H100")
    return sample(version, ProfiledRung(code, Problem(), profile, []))


def test_a_wait_for_a_result_counts_for_who_makes_it():
    found = sampled("02", lambda i: {"short_sb": 5} if i.base == "HMMA" and i.control.wait_mask else {})
    assert found.limiter.name == "fragment_loads"
    assert "gemm" in diagnosis.report(found)[2]
    assert found.time == 1000


def test_a_wait_at_a_barrier_counts_as_a_wait_for_tiles():
    def stalls(instruction):
        return {"BAR": {"barrier": 30}, "HMMA": {"math": 1}}.get(instruction.base, {})

    found = sampled("02", stalls)
    mmas = sum(i.base == "HMMA" for i in found.code.instructions)
    barriers = sum(i.base == "BAR" for i in found.code.instructions)
    (limit,) = found.limits
    assert limit.name == "copies"
    assert limit.without == pytest.approx(1000 * mmas / (mmas + 30 * barriers))


def test_of_a_load_with_conflicts_the_conflicts_have_their_share():
    found = sampled("01", lambda i: {"mio": 8} if i.base == "LDSM" else {"math": 8} if i.base == "HMMA" else {}, 8)
    loads, mmas = (sum(i.base == base for i in found.code.instructions) for base in ("LDSM", "HMMA"))
    left = {limit.name: limit.without for limit in found.limits}
    assert left["bank_conflicts"] == pytest.approx(1000 * (1 - 7 / 8 * loads / (loads + mmas)))
    assert left["fragment_loads"] == pytest.approx(1000 * (1 - 1 / 8 * loads / (loads + mmas)))
    assert "at best" in " ".join(diagnosis.report(found))


def test_without_samples_there_is_no_diagnosis():
    with pytest.raises(DeviceError, match="profile a larger problem"):
        sampled("02", lambda instruction: {})


# The tool


def call(*arguments):
    return run_tool(tool.main, tool.parser(), arguments)


def test_the_tool_says_why_and_links_the_idea(capsys):
    assert call("02") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "What costs most is waiting for tiles" in said
    assert "kernel.cu:" in said
    assert "versions/forward/03_eager_load/README.md" in said
    assert "This is a prediction" in said


def test_the_tool_takes_kept_pages(tmp_path, capsys):
    version, problem = catalog.find("02"), Problem(num_heads=2, seqlen_q=128)
    artifact = build_one(version, version.config_for(problem, H100), H100.arch)
    fake_ncu.write_pages(tmp_path / "pages" / version.name, artifact, problem)
    options = ("--batch", "1", "--heads", "2", "--seqlen", "128", "--gpu", "h100")
    assert call("02", *options, "--pages", str(tmp_path / "pages")) == 0
    assert "Nsight Compute sampled" in capsys.readouterr().out
    assert call("02", *options, "--pages", str(tmp_path / "none")) == EXIT_ERROR
    assert "no pages are kept" in capsys.readouterr().err


def test_several_rungs_have_a_line_each(capsys):
    assert call("01", "02", "03") == 0
    said = capsys.readouterr().out
    assert "02_swizzling" in said
    assert "03_eager_load" in said


def test_two_rungs_are_compared(capsys):
    assert call("01", "02", "--gpu", "h100") == 0
    said = capsys.readouterr().out
    assert "02_swizzling has over 01_base:" in said
    assert "  02  Swizzling: The 16-byte chunks" in said
    one, other = re.search(r"faster without bank_conflicts +([\d.]+)% +([\d.]+)?", said).groups()
    assert (float(one) > 10, other) == (True, None)
    assert [rung.number for rung in difference.lineage(catalog.find("27"))] == ["25", "26", "27"]


@pytest.mark.slow
def test_a_kernel_with_an_expression_is_explained(capsys):
    """On tensors that it reads: tiles of rung 52 have more rows than two blocks have keys, and each has a position."""
    mask, score = "k <= q || image[b, q] == image[b, k]", "s + h"
    assert call("52", "--gpu", "h100", "--mask", mask, "--score", score, "--tensor", "image=arange:1,64") == 0
    said = capsys.readouterr().out
    assert "mods=image:int32[][];mask=k<=q||image[b][q]==image[b][k];score=s+h" in "".join(said.split())
    assert re.search(r"takes [\d,]+ cycles of an SM", " ".join(said.split()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("99",), "no version 99"),
        (("02", "--gpu", "abacus"), "abacus"),
        (("02", "--config", "block_m=7"), "block_m=7"),
        (("51", "--mask", "k <= p"), "no name p"),
        (("51", "--tensor", "far=3"), "give --mask or --score too"),
        (("51", "--mask", "k <= q", "--tensor", "far=3"), "no expression reads far"),
        (("51", "--mask", "k <= q", "--pages", "folder"), "expressions are predicted, and not sampled"),
    ],
)
def test_bad_input_is_told(arguments, message, capsys):
    assert call(*arguments) == EXIT_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_rung_01_is_seen_to_fight_bank_conflicts(capsys):
    try:
        find_ncu()
    except ToolchainError as error:
        pytest.skip(str(error))
    assert call("01") == 0
    shown = capsys.readouterr()
    said = " ".join(shown.out.split())
    if "keeps the GPU's counters from this user" in " ".join(shown.err.split()):
        pytest.skip(shown.err)
    assert "Nsight Compute sampled" in said, shown.err
    assert "What costs most is bank conflicts" in said


@pytest.mark.parametrize(
    ("memory", "said"), [(0.0, ""), (50.0, "takes 50 cycles"), (200.0, "then memory is the limit")]
)
def test_where_speed_is_told_in_bytes_memory_is_said(memory, said):
    found = Diagnosis(None, None, "", 100.0, CYCLES, 0.0, (), memory)
    assert said in "".join(diagnosis._memory(found))
