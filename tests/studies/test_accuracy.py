"""What families of inputs say of the rungs: on the emulator beside a plain FlashAttention-2."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import catalog, console
from flashladder.common.compiler.compile import translate
from flashladder.common.errors import DeviceError
from flashladder.common.measure.entrants import Entrant
from flashladder.common.paths import PUBLISHED
from flashladder.common.problem.families import FAMILIES
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.operations.forward import attention
from flashladder.common.problem.problem import DTYPES
from flashladder.common.records import records
from flashladder.common.report import accuracy as view
from flashladder.common.report import sections
from flashladder.common.report.pages import accuracy as page
from flashladder.common.runtime import target
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.studies.accuracy import deviation, study, timing, yardstick
from flashladder.tests.support import fake_gpu, made_up
from flashladder.tests.support.designed import drawn, drawn_by
from flashladder.tools.commands import accuracy

pytestmark = pytest.mark.slow

SCALES = ("tiny_scale", "huge_scale")
ONE_LAUNCH = tuple(name for name in FAMILIES if name not in SCALES)  # a softmax_scale is the launch's
RUNGS = ("16", "17", "18", "24", "37", "43")  # one of each softmax, and the last of those with it


def test_a_family_is_the_same_alone_and_in_a_stack():
    place = target.resolve("emulator", None)
    stacks = study.Study([], place, families=("normal", "sinks", "tiny_scale"), dtypes=("fp16",)).stacks()
    assert [[part.family for part in stack.parts] for stack in stacks] == [["normal", "sinks"], ["tiny_scale"]]
    for stack in stacks:
        tensors = stack.tensors("cpu")
        for i, part in enumerate(stack.parts):
            alone = make_inputs(part)
            for name in "qkv":
                assert torch.equal(getattr(tensors, name)[i], getattr(alone, name)[0])


# Errors and bars


def judged(o=lambda exact: exact, lse=lambda exact: exact, family="normal_3", dtype="bf16"):
    """What is missed by an output made from the exact one, with the yardstick's bars."""
    problem, tensors = drawn(family, dtype=dtype)
    truth = deviation.exact(problem, tensors)
    theirs = deviation.compare(truth, *yardstick.run(problem, tensors))
    ours = deviation.compare(truth, o(truth.values).to(DTYPES[dtype]), lse(truth.lse).float())
    return deviation.bars(truth, theirs, dtype, problem.seqlen_k, FAMILIES[family].one_hot).missed(ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounded_answer_meets_every_bar(dtype):
    for family in FAMILIES:
        assert judged(family=family, dtype=dtype) == (), family


def test_heads_that_share_k_are_rows():
    """Errors of a column of V are alike in them, as they are in rows of one head."""
    shapes = {"seqlen_q": 16}, {"seqlen_q": 1, "num_heads": 16, "num_heads_k": 1}
    of_rows, of_heads = (drawn("sinks", **shape) for shape in shapes)
    assert torch.equal(of_rows[1].q, of_heads[1].q.transpose(1, 2))
    found = [deviation.compare(deviation.exact(*each), *yardstick.run(*each)) for each in (of_rows, of_heads)]
    assert asdict(found[0]) == pytest.approx(asdict(found[1]))


def test_every_planted_error_is_found():
    half_ulp = 2.0**-8
    assert judged(o=lambda o: o * (1 - half_ulp / 8)) == ("mean",)
    assert judged(o=lambda o: o * (1 + half_ulp * torch.randn(o.shape))) == ("rms",)
    assert judged(lse=lambda lse: lse + 2e-5) == ("lse",)
    assert judged(o=lambda o: o * math.inf)[:2] == ("rms", "mean")
    assert judged(lse=lambda lse: lse * math.nan) == ("lse",)

    def off_by_two(o):
        o = o.clone()
        o[0, 5, 0, 3] *= 1 + 4 * half_ulp
        return o

    assert judged(o=off_by_two, family="one_hot") == ("ulps",)


@settings(max_examples=30, deadline=None)
@given(st.floats(-6e4, 6e4, width=16), st.sampled_from(list(DTYPES.values())))
def test_an_ulp_is_the_way_to_the_next_number(number, dtype):
    x = torch.tensor([number], dtype=dtype)
    beyond = torch.nextafter(x.abs(), torch.tensor(math.inf, dtype=dtype))
    assert deviation._ulp(x.double(), dtype).item() == (beyond.double() - x.abs().double()).item()


def test_the_yardstick_is_attention():
    problem, tensors = drawn("falling_steeply", num_heads=2, num_heads_k=1, seqlen_k=100)
    o, lse = yardstick.run(problem, tensors)
    exact, exact_lse = attention(problem, tensors.by_name, torch.float64)
    torch.testing.assert_close(o.double(), exact, rtol=0.01, atol=0)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


# The rungs


def missed_bars(rungs, dtype, **options):
    """What each misses, by family. Together they need what is exact, and the yardstick's, only once."""
    entrants = [Entrant(rung, catalog.find(rung), {}) for rung in rungs]
    asked = study.Study(entrants, target.resolve("emulator", None), dtypes=(dtype,), **options)
    found = [row for rows in study.rows(asked) for row in rows]
    assert sum(row["verdict"] != study.YARDSTICK for row in found) == len(asked.families) * len(rungs)
    missed = [row for row in found if row["verdict"] == study.MISSED]
    return {
        rung: {row["family"]: row["missed"] for row in missed if row["version"] == catalog.find(rung).name}
        for rung in rungs
    }


def known_to_miss(number, dtype):
    """By family. From 33 on m may lag below a few scores, whose P are rounded one way; 51 has the softmax of 24."""
    if number < "33" or number == "51":
        return {}
    return {"plateau_sparse": "rms"} | ({"plateau_nudge": "rms mean", "runner_up": "rms"} if dtype == "fp16" else {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_rungs_meet_every_bar(dtype):
    known = {rung: known_to_miss(rung, dtype) for rung in RUNGS}
    assert missed_bars(RUNGS, dtype, families=ONE_LAUNCH) == known


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_textbook_meets_every_bar(dtype):
    assert missed_bars(["00"], dtype, families=ONE_LAUNCH, lengths=(128,), rows=32) == {"00": {}}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fastest_meets_the_bars_of_other_scales(dtype):
    assert missed_bars(["24"], dtype, families=SCALES, lengths=(256,)) == {"24": {}}


def lone_top(seqlen_k):
    """fp16: all keys but the last 10.47 nats below it, and V 1 there, 0 at the last. O is what the small ones weigh."""

    def design(sketch):
        sketch.add(-10.47, (sketch.behind > 0).float())
        sketch.v.copy_((sketch.behind > 0)[None, :, None])

    problem, tensors = drawn_by([design], seqlen_q=128, seqlen_k=seqlen_k, dtype="fp16")
    weight = (seqlen_k - 1) * math.exp(-10.47)
    return problem, tensors, weight / (1 + weight)


@pytest.mark.parametrize("rung", ["18", "24"])
def test_many_small_weights_count(rung):
    problem, tensors, expected = lone_top(1024)
    version = catalog.find(rung)
    on_emulator(translate(version, version.config_for(problem), "sm_80"), problem, tensors, race=False)
    assert (tensors.o / expected - 1).abs().max() < 2e-3


# Times, on a stand-in for a GPU


def test_a_family_that_slows_a_kernel_is_found(monkeypatch):
    fake_gpu.install(monkeypatch)

    def launch(artifact, problem, tensors):
        def run():
            tensors.o.fill_(1)

        run.time_us = {"leaping": 120.0, "sinks": 105.0}.get(problem.family, 100.0)
        return run

    monkeypatch.setattr(timing, "on_gpu", launch)
    monkeypatch.setattr(timing, "_tensors", lambda problem: make_inputs(replace(problem, seqlen_q=64, seqlen_k=64)))
    families = ("normal", "sinks", "leaping", "equal_keys")
    asked = study.Study([Entrant("16", catalog.find("16"), {})], target.resolve("gpu", None), (), families, ("bf16",))
    (rows,) = timing.rows(asked, lambda version, dtype, family: family == "equal_keys")
    verdicts = {row["family"]: (row["verdict"], row["missed"]) for row in rows}
    assert verdicts == {"sinks": (study.MET, ""), "leaping": (study.MISSED, "time")}
    assert rows[0]["time_ratio"] == pytest.approx(1 / 1.05, rel=0.01)


# The tool


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Calls the tool as a person does; gives its exit code, output and errors."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))

    def call(*arguments):
        code = console.run(accuracy.main, accuracy.parser(), [*arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


ERRORS = ("--device", "emulator", "--families", "normal,plateau_2", "--dtypes", "bf16", "--seqlens", "128", "--no-time")
QUICK = ("16", *ERRORS)


def test_a_study_is_shown_and_logged(run):
    code, out, err = run(*QUICK)
    assert code == 0, err
    assert "2 of 2" in out
    assert re.search(r"about \d+ s on the emulator", err), "how long it takes is said before"
    frame, damaged = records.accuracy().read()
    assert damaged == []
    assert list(frame["version"]) == ["plain"] * 2 + ["16_static_stride"] * 2
    assert list(frame["family"]) == ["normal", "plateau_2"] * 2
    assert frame["rms_error"].between(1e-5, 4e-3).all()


def test_caches_are_studied_apart(run, tmp_path):
    """Errors alone, and on no page."""
    few = ("--families", "largest_values,sinks", "--dtypes", "bf16", "--seqlens", "128", "--rows", "16")
    code, out, err = run("mla/05", "--device", "emulator", *few)
    assert code == 0, err
    assert "2 of 2" in out
    frame, _ = records.accuracy().read()
    assert set(frame["operation"]) == {"mla"}
    assert frame["computed_twice"].isna().all()
    records.accuracy().append(frame.assign(device=fake_gpu.NAME).replace({float("nan"): None}).to_dict("records"))
    assert run("--page")[0] == 0
    assert "Nothing has been measured yet" in (tmp_path / "accuracy.md").read_text()


def test_gradients_are_studied_beside_a_plain_backward_pass(run):
    """Of what calls launch: P is rounded for dV alone, as in FlashAttention-2, so no error is larger than its."""
    few = ("--device", "emulator", "--families", "normal,rising_gently", "--dtypes", "bf16", "--seqlens", "128")
    code, out, err = run("backward/20", *few)
    assert code == 0, out + err
    assert len(re.findall(r"\(\d\.\d{3}\)", out)) == 2 * 3, "of each family and gradient"
    code, out, err = run("backward", *few)
    assert code == 0, out + err
    assert run("backward/23", "--no-log", *few)[0] == 0, "what expressions are put into"
    frame, _ = records.accuracy().read()
    assert len(frame) == 2 * 2 * 2 * 3, "two studies of two kernels, two families, and three gradients"
    ours = frame[frame["version"] == "backward/20_a_tile_late"]
    assert ours["rms_error"].to_numpy() == pytest.approx(frame["rms_error"][:6], rel=0.02)
    assert run("--page")[0] == 0


@pytest.mark.parametrize("name", deviation.GRADIENTS)
def test_a_planted_error_of_a_gradient_is_found(name):
    problem, tensors = drawn("normal", operation="backward")
    truth = deviation.exact_gradients(problem, tensors)[name]
    plain = dict(zip(deviation.GRADIENTS, yardstick.run(problem, tensors), strict=True))[name]
    theirs = deviation.compare(truth, plain)
    bars = deviation.bars_of_gradient(theirs, problem.dtype)
    error = plain.double() - truth.values
    assert bars.missed(deviation.compare(truth, truth.values + 1.04 * error)) == ()
    assert bars.missed(deviation.compare(truth, truth.values + 1.06 * error)) == ("rms",)
    assert bars.missed(deviation.compare(truth, plain * math.nan)) == ("rms",)


def test_what_was_measured_before_a_kernel_died_is_logged(run, monkeypatch):
    def dying(artifact, *arguments, **options):
        if artifact.version.startswith("17"):
            raise DeviceError("it died")
        return on_emulator(artifact, *arguments, **options)

    monkeypatch.setattr(study, "on_emulator", dying)
    code, _, err = run("16", "17", *ERRORS)
    assert (code, "it died" in err) == (console.EXIT_ERROR, True)
    assert list(records.accuracy().read()[0]["version"]) == ["plain"] * 2 + ["16_static_stride"] * 2


def test_tiles_that_are_computed_twice_are_counted(run, tmp_path):
    """P V of large values leaves fp32's range: bf16 begins anew two blocks later. fp16 looks at every maximum."""
    code, out, err = run("24", "--device", "emulator", "--families", "plateau_2,large_values", "--seqlens", "512")
    assert code == 0, err
    assert "large_values 25.0%" in out
    assert re.search(r"about \d+ s more to count", err), "the count takes longer than the errors, and is said too"
    frame, _ = records.accuracy().read()
    twice = frame.dropna(subset="computed_twice").set_index(["dtype", "family"])["computed_twice"]
    assert dict(twice) == {
        ("bf16", "plateau_2"): 0,
        ("bf16", "large_values"): 0.25,
        ("fp16", "plateau_2"): 0,
        ("fp16", "large_values"): 0,
    }
    on_gpu = frame[frame["computed_twice"].isna()].replace({"device": {"emulator": fake_gpu.NAME}}).astype(object)
    records.accuracy().append(on_gpu.where(on_gpu.notna(), None).to_dict("records"))
    assert run("--page")[0] == 0
    text = (tmp_path / "accuracy.md").read_text()
    assert "large_values 25.0% |" in text
    assert "none |" in text
    assert "Tiles counted by the emulator: 128 queries, 512 keys." in text


def test_a_missed_bar_is_said_and_fails(run, monkeypatch):
    monkeypatch.setattr(deviation, "LSE_FLOOR", -1.0)
    code, out, _ = run(*QUICK)
    assert code == accuracy.EXIT_MISSED
    assert "beyond a bar: 16 Static global stride, bf16, plateau_2: lse with 128 keys" in out


def test_a_damaged_log_is_named_and_kept(run):
    run(*QUICK)
    (log,) = made_up.change(records.accuracy(), lambda text: text + "not,a,row\n")
    code, _, err = run("--page")
    assert code == 0
    assert f"{log.name}:6: 3 cells under" in err
    assert len(records.accuracy().read()[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--families", "plateau"), "no family plateau; did you mean plateau_4?"),
        (("--dtypes", "fp8"), "no dtype fp8; there are bf16"),
        (("--device", "cpu"), "a rung is a CUDA kernel"),
        (("99",), "99"),
        (("serving/01",), "of O and of gradients; the operation append has other outputs"),
    ],
)
def test_what_cannot_be_studied_is_refused(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == console.EXIT_ERROR
    assert message in err


def test_the_families_are_listed(run):
    code, out, _ = run("--list")
    assert code == 0
    assert all(name in out for name in FAMILIES)


# The page


def test_the_page_shows_the_latest_of_a_gpu(run, tmp_path):
    run(*QUICK)
    assert run("--page")[0] == 0
    assert "Nothing has been measured yet" in (tmp_path / "accuracy.md").read_text()
    frame, _ = records.accuracy().read()
    on_gpu = frame.replace({"device": {"emulator": fake_gpu.NAME}, "version": {"plain": "fa2"}}).astype(object)
    ours = on_gpu["version"] == "16_static_stride"
    on_gpu.loc[ours & (on_gpu["family"] == "normal"), ["verdict", "missed", "rms_error"]] = ("missed", "rms", 0.5)
    records.accuracy().append(on_gpu.where(on_gpu.notna(), None).to_dict("records"))
    assert run("--page")[0] == 0
    text = (tmp_path / "accuracy.md").read_text()
    assert "| 16 Static global stride | bf16 | 1 of 2 | normal | 128 |" in text
    assert "- 16 Static global stride, bf16, normal: rms with 128 keys" in text
    assert f"Measured on {fake_gpu.NAME}" in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {"accuracy_bf16.svg"}
    assert "ours, beyond a bar" in (tmp_path / "accuracy_bf16.svg").read_text()


def test_a_log_that_more_columns_were_added_to_has_its_page():
    """Its older rows have nothing in them, not even the operation."""
    frame, _ = records.accuracy(PUBLISHED).read()
    page_of = lambda rows: len(page.parts(Path("accuracy.md"), rows))  # noqa: E731 - its charts and its section
    assert page_of(frame.assign(operation="")) == page_of(frame) > 1


def test_the_committed_page_shows_the_committed_log():
    frame, _ = records.accuracy(PUBLISHED).read()
    written = PUBLISHED / "accuracy.md"
    assert sections.between(written, page.MARKER) == page.text(written, view.latest(frame))


def test_each_kernel_is_shown_from_its_last_device():
    """Also where the devices have other yardsticks."""
    frame, _ = records.accuracy(PUBLISHED).read()
    now = view.latest(frame)
    before = frame[frame["version"].isin(["fa2", "43_across_tiles"]) & (frame["device"] == "NVIDIA H200")]
    elsewhere = before.assign(device="NVIDIA GH200").replace({"version": {"fa2": "plain"}})
    found = view.latest(pd.concat([elsewhere, frame], ignore_index=True))
    device_of = found.groupby("version")["device"].agg(set)
    assert device_of["plain"] == {"NVIDIA GH200"}
    assert device_of["48_column_of_ones"] == set(now["device"][now["version"] == "48_column_of_ones"])
    for chart in page._charts(Path("accuracy.md"), found):
        assert chart.draw()


def test_the_last_row_counts():
    frame = pd.DataFrame(columns=[*records.ACCURACY.columns])
    row = {"device": "G", "version": "16_static_stride", "dtype": "bf16", "family": "normal", "seqlen_k": 128}
    for verdict in (study.MISSED, study.MET):
        frame = pd.concat([frame, pd.DataFrame([row | {"verdict": verdict, "rms_error": 0.1, "rms_bar": 1.0}])])
    assert list(view.latest(frame.reset_index(drop=True))["verdict"]) == [study.MET]
