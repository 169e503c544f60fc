"""Which rung attention() launches: between rivals, the one whose winner measured best for the problem on the GPU."""

import dataclasses
import statistics

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.api import attention
from flashladder.common.catalog import launches, winners
from flashladder.common.catalog.ladder import Launch
from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import ahead, fast_path, ready
from flashladder.tests.support import fake_cuda
from flashladder.tests.support.tiny_ladder import make_rung
from flashladder.tuner.adopt import export

LAUNCHES = catalog.ladder_of("forward").launches
RIVALS = (LAUNCHES[0].rung, "43_across_tiles")  # the second one takes no softcap
FIRST, SECOND = map(catalog.find, RIVALS)
BOTH = (FIRST, SECOND)
LONG_FROM, LENGTHS = catalog.ladder_of("forward").long_from, catalog.ladder_of("forward").lengths
ANY = "dtype=bf16,head_dim=128,causal=false"
SHORT, LONG = f"{ANY},length=short", f"{ANY},length=long"
PROBLEMS = {SHORT: Problem(seqlen_q=4096, seqlen_k=1024), LONG: Problem(seqlen_q=64, seqlen_k=4096)}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """No winners, but those that a test saves."""
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    return tmp_path / "tuned"


@pytest.fixture(autouse=True)
def rivals(monkeypatch):
    """Two rungs between which winners decide."""
    second = Launch(rung=RIVALS[1], rival=True, emulated=False)
    ladder = catalog.ladder_of("forward")
    first = LAUNCHES[0].model_copy(update={"rival": True})
    ladder = ladder.model_copy(update={"launches": (first, second, *LAUNCHES[1:])})
    monkeypatch.setattr(launches, "ladder_of", lambda operation: ladder)


@pytest.fixture
def mine(tmp_path):
    """The folder of what a program adopted."""
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def save(rung, kind, ratio, home=None, gpu="h200", **values):
    winners.save(gpu, rung.name, kind, values, {"ratio": ratio} if ratio else {}, home)


def fastest(problem, gpu="h200", arch="sm_90a", emulated=False, adopted=None):
    described = dataclasses.replace(load_gpu("h200"), name=gpu)
    return catalog.choice(problem, catalog.Card(arch, described, emulated), adopted=adopted)[0]


def taken(kind, gpu="h200", **options):
    return fastest(PROBLEMS[kind], gpu, **options)


def test_without_winners_it_is_the_first():
    assert taken(SHORT) == taken(LONG) == FIRST


@pytest.mark.parametrize("kind", [SHORT, ANY, LONG])
@pytest.mark.parametrize(
    ("ratios", "best"),
    [
        (("1.9000 [1.8990, 1.9010]", "2.1000 [2.0990, 2.1010]"), SECOND),
        (("10.0000 [9.9, 10.1]", "9.0000 [8.9, 9.1]"), FIRST),  # as numbers, not as words
        (("2.0000 [1.9, 2.1]", "2.0 [1.8, 2.2]"), FIRST),
        ((None, "0.5"), SECOND),
        ((None, None), FIRST),
    ],
)
def test_the_higher_ratio_then_the_first(kind, ratios, best):
    for rung, ratio in reversed(list(zip(BOTH, ratios, strict=True))):
        save(rung, kind, ratio)
    assert taken(SHORT) == taken(LONG) == best


def test_a_gpu_without_winners_has_those_of_the_nearest():
    save(SECOND, SHORT, "2.0")
    assert taken(SHORT) == taken(SHORT, "h100") == taken(SHORT, "a-gpu-that-nobody-described") == SECOND
    save(FIRST, LONG, "2.0", gpu="h100")
    assert (taken(SHORT), taken(SHORT, "h100")) == (SECOND, FIRST), "one winner, and it has its own"


@pytest.mark.parametrize(
    ("gpu", "tuned", "source"),
    [
        ("h800", ("h200", "h100-nvl", "h20"), "h100-nvl"),
        ("h100-nvl", ("h100", "h20", "h100-pcie"), "h100"),
        ("h100-pcie", ("h20", "h200"), "h200"),
        ("h100", ("a100", "l4"), "h100"),  # none of its arch
        ("h100", (), "h100"),
        ("h100", ("h100", "h800"), "h100"),
    ],
)
def test_the_nearest_is_of_the_same_arch_and_alike_in_sms_and_bandwidth(gpu, tuned, source):
    for name in (*tuned, "not-described"):
        save(FIRST, SHORT, "2.0", gpu=name)
    assert winners.source(load_gpu(gpu)) == source


def test_where_the_driver_tells_no_bandwidth_sms_decide():
    for name in ("h20", "h200"):
        save(FIRST, SHORT, "2.0", gpu=name)
    assert winners.source(dataclasses.replace(load_gpu("h100-pcie"), name="untold", bandwidth_gb_s=0.0)) == "h200"


def test_what_a_program_adopted_makes_a_gpu_one_with_winners(mine):
    save(SECOND, SHORT, "2.0")
    save(FIRST, SHORT, "2.0", mine, gpu="gh200")
    assert winners.source(load_gpu("gh200")) == "h200"
    assert winners.source(load_gpu("gh200"), adopted=mine) == "gh200"


def test_the_emulator_and_other_architectures_take_the_oldest():
    save(SECOND, SHORT, "2.0")
    assert taken(SHORT, emulated=True).name == "24_woven_general"
    assert fastest(PROBLEMS[SHORT], arch="sm_80").name == "24_woven_general"


def test_a_winner_for_one_class_only():
    """It is for the other class too, as its configuration is, until that has a winner of its own."""
    save(SECOND, SHORT, "1.5")
    assert taken(SHORT) == taken(LONG) == SECOND
    save(FIRST, LONG, "1.2")
    assert (taken(SHORT), taken(LONG)) == (SECOND, FIRST)


def test_only_winners_of_one_kind_are_compared():
    save(FIRST, ANY, "9.0")
    save(SECOND, SHORT, "1.0")
    assert (taken(SHORT), taken(LONG)) == (SECOND, FIRST)


def timed(*times_us):
    """Evidence of problems of 512, 1,024, ... keys, whose baseline takes 100 us each."""
    names = [f"seqlen_k={512 << i}" for i, time in enumerate(times_us) if time]
    times = [time for time in times_us if time]
    ratio = 100 / statistics.geometric_mean(times)
    return {"ratio": f"{ratio:.4f}", "problems": names, "times_us": times, "baseline_us": [100.0] * len(times)}


@pytest.mark.parametrize(
    ("first", "second", "best"),
    [
        (timed(None, 40), timed(80, 39), SECOND),  # tuned again with the length at which both are fast
        (timed(None, 40), timed(80, 41), FIRST),
        (timed(50, 40), timed(49, 39), SECOND),
        (timed(None, 40), timed(80), FIRST),  # nothing in common: by their ratios
        (timed(None, 90), timed(80), SECOND),
    ],
)
def test_winners_are_compared_by_problems_that_they_share(first, second, best):
    for rung, evidence in zip(BOTH, (first, second), strict=True):
        winners.save("h200", rung.name, SHORT, {}, evidence)
    assert taken(SHORT) == best


@pytest.mark.parametrize("times", [[40.0], ["fast", 40.0], [0, 40.0], [-1.0, 40.0], 5])
def test_damaged_times_are_named(times):
    winners.save("h200", FIRST.name, SHORT, {}, timed(50, 40) | {"times_us": times})
    with pytest.raises(ConfigError, match=rf"the winner of {FIRST.name} for .* is damaged"):
        taken(SHORT)


@pytest.mark.parametrize("problems", [5, None, "seqlen_k=512", [[1]]])
def test_problems_that_are_none_are_no_problem(problems):
    for rung, times in zip(BOTH, ((50, 40), (49, 39)), strict=True):
        winners.save("h200", rung.name, SHORT, {}, timed(*times) | ({"problems": problems} if rung == FIRST else {}))
    assert taken(SHORT) == SECOND, "by their ratios"


@pytest.mark.parametrize("name", [launch.rung for launch in LAUNCHES[1:]])
def test_a_winner_of_a_rung_that_is_no_rival_says_nothing(name):
    """As rung 24's on an H200, which was found before there were rungs for Hopper."""
    save(catalog.find(name), SHORT, "9.0")
    assert taken(SHORT) == FIRST


def test_a_rival_that_does_not_take_the_problem_is_not_taken():
    save(SECOND, SHORT, "2.0")
    for asked in ({"softcap": 30.0}, {"alibi": True}):
        assert fastest(dataclasses.replace(PROBLEMS[SHORT], **asked)) == FIRST


def test_one_that_the_rung_has_no_more_does_not_count():
    save(SECOND, SHORT, "2.0", block_n=999 * 16)
    assert taken(SHORT) == FIRST
    save(FIRST, SHORT, "1.0")
    assert taken(SHORT) == FIRST
    save(SECOND, ANY, "3.0")
    assert taken(SHORT) == FIRST, "of the nearest kind that stands"


@pytest.mark.parametrize("ratio", ["fast", " ", "[1.0, 1.1]", "nan", "inf", "-1.0", "0"])
def test_a_damaged_ratio_is_named(folder, ratio):
    save(FIRST, SHORT, ratio)
    with pytest.raises(ConfigError, match=rf"{folder}/h200.yaml: the winner of {FIRST.name} for .* its ratio is '"):
        taken(SHORT)


def test_a_problem_stays_with_the_rung_that_was_adopted_for_it(monkeypatch, mine):
    save(FIRST, SHORT, "1.0", mine)
    save(SECOND, SHORT, "2.0")
    save(SECOND, LONG, "2.0")
    assert taken(SHORT) == SECOND
    assert taken(SHORT, adopted=mine) == FIRST
    monkeypatch.setenv("FLASHLADDER_ADOPTED", str(mine))
    assert taken(SHORT) == taken(LONG) == FIRST, "as its configuration is: whatever its length"
    other = dataclasses.replace(PROBLEMS[SHORT], head_dim=64, head_dim_v=64)
    save(SECOND, winners.name_of(other), "2.0")
    assert fastest(other) == SECOND, "what it did not ask for"


def test_an_adopted_winner_that_stands_no_more_gives_way(monkeypatch, mine):
    save(FIRST, SHORT, "9.0", mine, block_n=999 * 16)
    save(SECOND, SHORT, "2.0")
    monkeypatch.setenv("FLASHLADDER_ADOPTED", str(mine))
    assert taken(SHORT) == SECOND


@pytest.mark.parametrize("adopted", [{}, {SHORT: FIRST}, {LONG: SECOND}, {SHORT: SECOND, LONG: FIRST}])
def test_an_export_has_what_is_launched_with_it(monkeypatch, mine, adopted):
    """Its own winners, then those of this repository, then defaults."""
    save(SECOND, LONG, "2.0", q_stages=1)
    for kind, rung in adopted.items():
        save(rung, kind, "1.0", mine)
    gpu = load_gpu("h200")
    made = export.kernels(mine, catalog.FASTEST, "sm_90a", gpu, [PROBLEMS[SHORT]])
    monkeypatch.setenv("FLASHLADDER_ADOPTED", str(mine))
    for problem in PROBLEMS.values():
        for lse in (False, True):
            asked = dataclasses.replace(problem, lse=lse)
            assert catalog.choice(asked, catalog.Card("sm_90a", gpu)) in [(each.version, each.config) for each in made]


def test_a_wheel_has_both_rungs(monkeypatch):
    kinds_of_wheels = [kind for kind in ahead.kinds() if kind.operation == "forward"]
    monkeypatch.setattr(ahead, "kinds", lambda: kinds_of_wheels)
    kinds = [f"dtype=bf16,head_dim=64,causal=true,length={length}" for length in LENGTHS]
    for rung, kind in zip(BOTH, kinds, strict=True):
        save(rung, kind, "1.0")
    asked = {"bf16": {FIRST.name, SECOND.name}, "fp16": {FIRST.name}}
    for dtype, names in asked.items():
        made = [each for each in ahead.requests("9.0a") if each.config.dtype == dtype and each.config.head_dim == 64]
        assert {each.version.name for each in made if each.config.causal} == names


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two rungs, by their names."""
    ladder = tmp_path_factory.mktemp("ladder")
    return {name: make_rung(ladder, name) for name in ("07_tiny", "08_other")}


@pytest.fixture(params=["Python", "C++"])
def driver(request, monkeypatch, tiny):
    """CPU tensors are taken for ones on a GPU, whose rivals are two tiny rungs; with both ways of a call."""
    made = fake_cuda.for_attention(monkeypatch)
    monkeypatch.setattr(fast_path, "extension", fast_path.made() if request.param == "C++" else None)
    fake_cuda.launch_only(monkeypatch, *tiny.values())
    return made


def attend(seqlen_k):
    q, k = (torch.zeros(1, seqlen, 2, 64, dtype=torch.bfloat16) for seqlen in (256, seqlen_k))
    return attention(q, k, k, return_lse=True)


def rungs_by_length():
    """That stand ready."""
    return {kind.length: each.rung.name for (kind, *_), each in ready.by_kind.items()}


@pytest.mark.parametrize("first", [LONG_FROM - 3, LONG_FROM + 3])
def test_a_rung_for_short_keys_and_another_for_long_ones(driver, tiny, monkeypatch, first):
    """Both stand ready from the first call on, whichever that is of."""
    for (name, block_m), length in zip({"08_other": 128, "07_tiny": 64}.items(), LENGTHS, strict=True):
        kind = f"dtype=bf16,head_dim=64,causal=false,length={length}"
        save(tiny[name], kind, "1.0", gpu="h100", block_m=block_m)
    attend(first)
    assert rungs_by_length() == {
        "short": "08_other",
        "long": "07_tiny",
    }
    assert all(each.artifact.version == each.rung.name for each in ready.by_kind.values())
    for name in ("choice", "target", "build_one", "Call"):
        monkeypatch.setattr(ready, name, None)  # not even asked
    driver.launches.clear()
    lengths = [*range(LONG_FROM - 3, LONG_FROM + 3), 1, 5 * LONG_FROM, 1]
    for seqlen_k in lengths:
        attend(seqlen_k)
    rows = [256 // launch.shape[0] for launch in driver.launches]
    assert rows == [64 if seqlen_k >= LONG_FROM else 128 for seqlen_k in lengths]
    assert driver.loads == 2


def test_two_rungs_of_one_configuration_are_two(driver, tiny):
    kinds = [f"dtype=bf16,head_dim=64,causal=false,length={length}" for length in LENGTHS]
    for rung, kind in zip(tiny.values(), kinds, strict=True):
        save(rung, kind, "1.0", gpu="h100")
    attend(1)
    assert rungs_by_length() == dict(zip(LENGTHS, tiny, strict=True))
    assert driver.loads == 2
