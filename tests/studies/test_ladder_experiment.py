"""The ladder on a stand-in for a GPU: what is measured and logged, what is left out, how a killed run goes on."""

from functools import partial

import numpy as np
import pytest

from flashladder.common import catalog, console
from flashladder.common.catalog import find, winners
from flashladder.common.errors import DeviceError
from flashladder.common.measure import contest, nvml
from flashladder.common.measure.baselines import Baseline, forward
from flashladder.common.problem.config import parse_values, spell
from flashladder.common.problem.operations.forward import Forward
from flashladder.common.records import ladder_runs, ladders, records, run_files
from flashladder.common.studies.experiments import ladder as experiment
from flashladder.tests.support import fake_gpu, made_up
from flashladder.tools.commands import ladder

pytestmark = pytest.mark.slow

SMALL = ["--seqlens", "128,256", "--tokens", "256", "--dtypes", "bf16", "--rounds", "6", "--beside", ""]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Calls the tool as a person does; gives its exit code, output and errors."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    monkeypatch.setattr(Forward, "usual", {"num_heads": 1})
    fake_gpu.install(monkeypatch)

    def call(*arguments):
        code = console.run(ladder.main, ladder.parser(), [*arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def contests(monkeypatch):
    """The kernels of every contest that is held."""
    held = []
    hold = contest.hold

    def watched(problem, kernels, baselines, settings):
        held.append((problem.seqlen_q, *kernels))
        return hold(problem, kernels, baselines, settings)

    monkeypatch.setattr(contest, "hold", watched)
    return held


@pytest.fixture
def two_ladders(monkeypatch, tmp_path):
    """A second ladder beside the first, whose rung 02 is that of the first."""
    folder = tmp_path / "versions" / "more" / "02_other"
    folder.mkdir(parents=True)
    yaml = (find("02").directory / "version.yaml").read_text()
    (folder / "version.yaml").write_text(f"{yaml}kernel: {find('02').kernel}\n")
    first = folder.parents[1] / "forward"
    first.mkdir()
    for rung in ("01_base", "02_swizzling"):
        (first / rung).symlink_to(find(rung).directory)
    monkeypatch.setattr(catalog, "select", partial(catalog.select, root=tmp_path / "versions"))
    monkeypatch.setattr(catalog, "find", partial(catalog.find, root=tmp_path / "versions"))


def test_a_further_ladder_has_a_log_of_its_own(run, two_ladders):
    code, _, err = run("more", *SMALL)
    assert code == 0, err
    frame, damaged = records.ladder("h100", "more").read()
    assert (damaged, set(frame["version"]), len(frame)) == ([], {"more/02_other"}, 4)
    assert rows().empty
    assert "2 of 2 shapes are there already" in run("more/02", *SMALL)[1]
    assert run("02", *SMALL)[0] == 0, "02 of the first ladder is another rung"
    assert set(rows()["version"]) == {"02_swizzling"}


def test_rungs_of_two_ladders_are_not_measured_together(run, two_ladders):
    code, _, err = run("02", "more/02", *SMALL)
    assert code == console.EXIT_ERROR
    assert "the rungs are of several ladders (forward, more): name one" in err


def rows():
    frame, damaged = records.ladder("h100").read()
    assert damaged == []
    return frame


def test_every_rung_has_a_row_for_each_configuration_and_shape(run, contests):
    code, out, err = run("02", "07", *SMALL)
    assert code == 0, err
    frame = rows()
    expected = [
        (v, kind, s) for s in (128, 256) for v in ("02_swizzling", "07_auto_tuned") for kind in ("own", "fixed")
    ]
    assert list(zip(frame["version"], frame["kind"], frame["seqlen_q"], strict=True)) == expected
    assert frame["ratio"].between(1.24, 1.26).all()
    assert (frame["ratio_low"] <= frame["ratio"]).all()
    assert set(frame["verdict"]) == {"faster"}
    assert set(frame["device"]) == {fake_gpu.NAME}
    fixed = frame[frame["kind"] == "fixed"]
    assert fixed["config"].str.contains("block_m=64,block_n=64,num_warps=4,q_fragments=2").all()
    assert len(contests) == 2
    assert "bf16: means over the lengths" in out
    assert max(map(len, out[out.index("bf16: means") :].split("logged to")[0].splitlines())) <= 80
    assert frame["run"].nunique() == 1
    times = [row.split() for row in frame["round_us"]]
    assert {len(each) for each in times} == {6}
    assert np.allclose([np.median([float(time) for time in each]) for each in times], frame["time_us"], rtol=1e-4)
    assert set(frame["thermal_share"]) == {0.0}
    assert set(frame["samples"]) == {6 * 2 * 6}


def test_own_is_what_was_tuned_for_the_gpu_or_else_the_default(run):
    """A winner holds for its dtype; and the row says where its configuration is from."""
    run("02", *SMALL, "--seqlens", "128")
    winners.save("h100", "02_swizzling", "dtype=bf16,head_dim=128,causal=false", {"block_n": 32}, {})
    winners.save("a100", "07_auto_tuned", "dtype=bf16,head_dim=128,causal=false", {"block_n": 32}, {})
    code, out, err = run("02", "07", *SMALL, "--seqlens", "128", "--dtypes", "bf16,fp16")
    assert code == 0, err
    assert "goes on" not in out, "what was measured before it was tuned is no row of the winner"
    frame = rows()
    frame = frame[frame["run"] == frame["run"].iloc[-1]]
    own = frame[frame["kind"] == "own"]
    blocks = own["config"].str.extract(r"block_n=(\d+)")[0]
    found = zip(own["version"].str[:2], own["dtype"], blocks, own["chosen_by"], strict=True)
    defaults = {number: str(find(number).config().block_n) for number in ("02", "07")}
    assert list(found) == [
        ("02", "bf16", "32", "tuner"),
        ("07", "bf16", defaults["07"], "default"),
        ("02", "fp16", defaults["02"], "default"),
        ("07", "fp16", defaults["07"], "default"),
    ]
    assert set(frame[frame["kind"] == "fixed"]["chosen_by"]) == {""}
    run("02", *SMALL, "--seqlens", "128", "--untuned")
    assert rows()["chosen_by"].iloc[-2] == "default"


def test_a_log_from_before_the_columns_stays_valid(run):
    """Its rows are read, and no later run is taken for theirs."""
    run("02", *SMALL, "--seqlens", "128")
    young = 6  # samples, the shares, chosen_by and the rounds

    def before(text):
        lines = [line.rsplit(",", young)[0] for line in text.splitlines()]
        return "\n".join([lines[0], *(f"{line}power cap in 40% of samples" for line in lines[1:]), ""])

    made_up.change(records.ladder("h100"), before)
    assert rows()["round_us"].isna().all()
    _, out, _ = run("02", *SMALL, "--seqlens", "128")
    assert "goes on" not in out
    assert list(rows()["chosen_by"]) == ["", "", "default", ""]
    assert rows()["run"].nunique() == 2


def test_the_same_machine_code_is_timed_once(run, contests):
    own = find("02").config()
    same = ",".join(f"{name}={spell(getattr(own, name))}" for name in own.fields if name not in ("dtype", "head_dim"))
    run("02", *SMALL, "--seqlens", "128", "--fixed", same)
    assert contests == [(128, "02 own")]
    frame = rows()
    assert list(frame["kind"]) == ["own", "fixed"]
    assert frame["tflops"].nunique() == frame["code"].nunique() == 1


def test_a_killed_run_goes_on_where_it_was(run, contests, monkeypatch):
    hold = contest.hold

    def killed(problem, *others):
        if problem.seqlen_q == 256:
            raise KeyboardInterrupt
        return hold(problem, *others)

    monkeypatch.setattr(contest, "hold", killed)
    code, _, _ = run("02", *SMALL)
    assert code == console.EXIT_INTERRUPTED
    assert list(rows()["seqlen_q"]) == [128, 128]

    monkeypatch.setattr(contest, "hold", hold)
    code, out, _ = run("02", *SMALL)
    assert code == 0
    assert "goes on: 1 of 2 shapes are there already" in out
    assert contests == [(128, "02 own", "02 fixed"), (256, "02 own", "02 fixed")]
    assert list(rows()["seqlen_q"]) == [128, 128, 256, 256]
    assert rows()["run"].nunique() == 1


def test_a_killed_run_goes_on_on_another_card_of_its_kind(run, contests):
    """Each length is of one card, whose baseline took part in its rounds; the run says of which cards it is."""
    run("02", *SMALL, "--seqlens", "128")
    card = rows()["gpu_id"].iloc[0]
    made_up.change(records.ladder("h100"), lambda text: text.replace(card, "another"))
    _, out, _ = run("02", *SMALL)
    assert "goes on: 1 of 2 shapes are there already" in out
    assert [held[0] for held in contests] == [128, 256]
    (whole,) = ladder_runs.runs_of(rows())
    assert whole.card.startswith(f"cards another and {rows()['gpu_id'].iloc[-1]}, each length on one")


@pytest.mark.parametrize("other", ["kind of card", "commit", "heat"])
def test_a_killed_run_goes_on_nowhere_else(run, contests, monkeypatch, other):
    """On another kind of card, with another commit, or where heat slowed the GPU, a new run begins with every shape."""
    run("02", *SMALL, "--seqlens", "128")
    log, row = records.ladder("h100"), rows().iloc[0]
    if other == "kind of card":
        made_up.change(log, lambda text: text.replace(row["device"], "another"))
    elif other == "commit":
        monkeypatch.setattr(records, "commit", lambda: "0123456789ab")
    else:
        made_up.change(log, lambda text: text.replace(",0.0,0.0,0.0,", ",0.0,0.5,0.0,"))
        assert ladder_runs.runs_of(rows())[0].is_hot
    _, out, _ = run("02", *SMALL)
    assert "goes on" not in out
    assert [held[0] for held in contests] == [128, 128, 256]
    assert list(rows().groupby("run", sort=False).size()) == [2, 4]


def test_measured_again_on_request_or_when_the_code_has_changed(run, contests):
    run("02", *SMALL, "--seqlens", "128")
    run("02", *SMALL, "--seqlens", "128")
    assert len(contests) == 1
    run("02", *SMALL, "--seqlens", "128", "--again")
    assert len(contests) == 2
    code = rows()["code"][0]
    made_up.change(records.ladder("h100"), lambda text: text.replace(code, "other"))
    run("02", *SMALL, "--seqlens", "128")
    assert contests[2:] == [(128, "02 own", "02 fixed")]
    assert rows()["run"].nunique() == 3


def test_a_damaged_row_is_named_and_left_in_place(run, contests):
    run("02", *SMALL, "--seqlens", "128")

    def damage(text):
        header, _, kept = text.splitlines(keepends=True)
        return f"{header}what is this\n{kept}"

    (log,) = made_up.change(records.ladder("h100"), damage)
    before = log.read_bytes()
    code, _, err = run("02", *SMALL, "--seqlens", "128")
    assert code == 0
    assert f"{log}:2: 1 cells under" in err
    assert contests[1:] == [(128, "02 own", "02 fixed")]
    assert log.read_bytes() == before


def test_a_wrong_kernel_is_logged_without_figures_and_tried_again(run, contests, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(contest, "on_gpu", lambda artifact, task, tensors: lambda: tensors.o.zero_())
        code, _, err = run("02", *SMALL, "--seqlens", "128")
    assert code == console.EXIT_ERROR
    assert "02 own is wrong, and not timed" in err
    assert not rows()["passed"].any()
    run("02", *SMALL, "--seqlens", "128")
    assert len(contests) == 2
    assert list(rows()["passed"]) == [False, False, True, True]


def test_a_rung_without_the_fixed_fields_has_its_own_configuration_alone():
    fixed = parse_values(ladder.FIXED_CONFIG)
    labels = [entrant.label for entrant in experiment.entrants([find("00"), find("16")], fixed, "sm_90a")]
    assert labels == ["00 own", "16 own", "16 fixed"]


def test_all_rungs_to_16_take_the_fixed_configuration():
    fixed = parse_values(ladder.FIXED_CONFIG)
    for number in range(1, 17):
        values = {name: value for name, value in fixed.items() if name in find(f"{number:02}").choices}
        config = find(f"{number:02}").config(**values)
        assert (config.block_m, config.block_n, config.num_warps, config.k_fragments) == (64, 64, 4, 2)


def test_the_slowest_rung_is_timed_at_the_shortest_length_alone(run, contests):
    code, _, err = run("00", "02", *SMALL)
    assert code == 0, err
    assert contests == [(128, "00 own", "02 own", "02 fixed"), (256, "02 own", "02 fixed")]


def test_the_field_takes_part_in_the_same_rounds(run, monkeypatch):
    """Official kernels and references have rows of their kind; what is missing, fails or refuses is left out."""
    fa2 = vars(forward.BASELINES["fa2"])
    takes, fails = ({**fa2, "name": name, "title": title} for name, title in (("cudnn", "cuDNN"), ("fa4", "FA4")))

    def failing(*_):
        def launch():
            raise RuntimeError("not built for this type\nmore")

        return launch

    monkeypatch.setitem(forward.BASELINES, "cudnn", Baseline(**takes))
    monkeypatch.setitem(forward.BASELINES, "fa4", Baseline(**{**fails, "bind": failing}))
    code, out, err = run("02", *SMALL, "--seqlens", "128", "--beside", "cudnn,fa3,fa4,cute")
    assert code == 0, err
    found = rows()[["version", "kind"]].itertuples(index=False, name=None)
    assert list(found) == [("cudnn", "field"), ("02_swizzling", "own"), ("02_swizzling", "fixed")]
    assert rows()["round_us"].str.split().str.len().eq(6).all()
    assert "fa3: flash_attn_interface cannot be imported" in err
    assert "fa4: FA4 failed: not built for this type\n" in err
    assert "cute cannot run: cutlass is not installed" in err
    assert "cudnn" in out
    code, _, err = run("02", *SMALL, "--beside", "16")
    assert code == console.EXIT_ERROR
    assert "16 is a rung" in err
    code, _, err = run("02", *SMALL, "--beside", "flashy")
    assert code == console.EXIT_ERROR


def test_a_run_slowed_by_heat_says_so_and_is_not_shown(run, monkeypatch):
    hot = nvml.GpuState(sm_mhz=1200, slowdowns=("thermal slowdown", "power cap"))
    monkeypatch.setattr(fake_gpu.FakeTimer, "sample", lambda self, plan: (getattr(plan.launch, "time_us", 100.0), hot))
    _, out, _ = run("02", *SMALL, "--seqlens", "128")
    assert "Not to be published: thermal slowdown in more than 3 % of the samples" in out
    assert set(rows()["thermal_share"]) == {1.0}
    assert ladder_runs.Ladder.of(rows()) is None


def test_bad_input(run):
    assert run("99")[0] == console.EXIT_ERROR
    code, _, err = run("02", "--fixed", "block_m")
    assert code == console.EXIT_ERROR
    assert "block_m" in err


def test_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))

    def none():
        raise DeviceError("there is no NVIDIA driver on this machine")

    monkeypatch.setattr("flashladder.common.runtime.target.require_gpu", none)
    assert console.run(ladder.main, ladder.parser(), []) == console.EXIT_ERROR
    assert "no NVIDIA driver" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.alone
def test_two_rungs_on_a_real_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    arguments = ["01", "02", "--seqlens", "512", "--dtypes", "bf16", "--rounds", "8", "--beside", "cudnn"]
    assert console.run(ladder.main, ladder.parser(), arguments) == 0
    (path,) = tmp_path.glob("runs/ladder_*@*.csv.gz")
    frame, _ = records.ladder(run_files.gpu_of(path, "ladder_*")).read()
    assert frame["passed"].all()
    assert frame["version"].iloc[0] == "cudnn"
    assert frame["round_us"].str.split().str.len().eq(8).all()
    assert frame["thermal_share"].between(0, 1).all()
    lines = ladders.summary({"gpu": ladder_runs.Ladder.of(frame, frame["run"].iloc[0])})
    step = lines[(lines["rung"] == "02") & (lines["kind"] == "own")].iloc[0]
    assert 3 < step["step_low"] < step["step"] < step["step_high"] < 8
    own = frame[frame["kind"] == "own"].set_index("version")["ratio"]
    assert 0.05 < own["01_base"] < 0.5 < own["02_swizzling"] < 1.1


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_a_budget_that_is_no_time_is_refused(capsys, value):
    with pytest.raises(SystemExit, match="2"):
        ladder.parser().parse_args(["--budget", value])
    assert f"argument --budget: {value} is not a number above 0" in capsys.readouterr().err
