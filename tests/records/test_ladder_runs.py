"""What the ladder's log comes to: which run is shown, and steps of paired rounds, on made-up rounds."""

import numpy as np
import pandas as pd
import pytest

from flashladder.common import catalog
from flashladder.common.problem.problem import Problem
from flashladder.common.records import ladder_runs, ladders, records
from flashladder.common.records.log import Log
from flashladder.common.records.schemas import LADDER
from flashladder.common.records.slowdowns import completed, remarks
from flashladder.common.report import ladder_tables
from flashladder.tests.support import made_up

CARD, OTHER_CARD = "0a0a0a0a0a0a", "0b0b0b0b0b0b"


def shown(*logs):
    """The ladder of rows."""
    return ladder_runs.Ladder.of(frame(*logs))


def frame(*logs):
    return pd.DataFrame([row for log in logs for row in log]).reindex(columns=[*LADDER.columns])


def run(name="made-up", gpu_id=CARD, rungs=("02", "07", "16"), beside=(), **changes):
    """The rows of a run, in both configurations."""
    changes = {"run": name, "gpu_id": gpu_id} | changes
    rows = [made_up.row(n, kind, s, **changes) for n in rungs for kind in ("own", "fixed") for s in made_up.LENGTHS]
    return rows + [made_up.field(name, s, **changes) for name in beside for s in made_up.LENGTHS]


def line(ladder, rung, kind="own"):
    found = ladders.summary({"h100": ladder})
    return found[(found["rung"] == rung) & (found["kind"] == kind)].iloc[0]


@pytest.mark.parametrize("kind", ["own", "fixed"])
def test_a_step_is_of_paired_rounds_and_drift_does_not_touch_it(kind):
    """The rounds of a shape drift by tens of per cent; the pairs do not."""
    found = line(shown(run()), "16", kind)
    truth = made_up.RATIOS["16"] / made_up.RATIOS["07"]
    assert found["below"] == "07_auto_tuned"
    assert found["step_low"] < truth < found["step_high"]
    assert found["step_high"] - found["step_low"] < 0.0005
    assert np.isnan(line(shown(run()), "02", kind)["step"]), "it is the lowest"


def test_rounds_that_are_swapped_are_no_pairs():
    """The same times in another order of rounds: the interval is as wide as the drift."""
    rows = run()
    for row in rows:
        if row["version"].startswith("16"):
            row["round_us"] = " ".join(reversed(row["round_us"].split()))
    found = line(shown(rows), "16")
    assert found["step_high"] - found["step_low"] > 0.05


@pytest.mark.slow
def test_the_interval_of_a_step_covers_the_truth():
    """In at least 85 of 100 ladders whose rounds have a noise of a per cent."""
    inside = 0
    for trial in range(100):
        rows = []
        for number, us in (("02", 110.0), ("07", 100.0)):
            times = made_up.round_us(us, (512, trial), (number, trial), noise=0.01)
            rows.append(made_up.row(number, "own", 512, round_us=times))
        found = line(shown(rows), "07")
        inside += found["step_low"] < 1.1 < found["step_high"]
    assert inside >= 85


def test_the_same_machine_code_is_no_step():
    rows = run(rungs=("02", "07"))
    times = {row["seqlen_q"]: row["round_us"] for row in rows if row["version"].startswith("02")}
    rows = [row | {"round_us": times[row["seqlen_q"]]} for row in rows]
    found = line(shown(rows), "07")
    assert (found["step"], found["step_low"], found["step_high"]) == (1, 1, 1)


def test_several_runs_give_no_step():
    """Neither a file from before rounds were kept, nor two runs of a rung each, whose rounds are as many."""
    old = [run("one", round_us=None), run("two", OTHER_CARD, rungs=("16",), round_us=None)]
    ladder = shown(*old)
    assert not ladder.is_one_run
    assert [each.name for each in ladder.runs] == ["one", "two"]
    assert ladders.summary({"h100": ladder})["step"].isna().all()
    assert "Joined of 2 runs on 2 cards, so that there are no steps. Rungs 02, 07: one (card 0a" in ladder.source

    pair = pd.concat([frame(run("one", rungs=("02", "07"))), frame(run("two", rungs=("16",)))])
    joined = ladder_runs.Ladder(pair, tuple(ladder_runs.runs_of(pair)), None, ())
    steps = ladders.summary({"h100": joined}).set_index(["rung", "kind"])["step"]
    assert np.isnan(steps["16", "own"])
    assert steps["07", "own"] > 1


def test_a_run_slowed_by_heat_is_refused():
    """A cool one before it stays what is shown; a few samples are no reason."""
    ladder = shown(run("cool", time="2026-01-01"), run("hot", time="2026-01-02", thermal_share=0.04))
    assert [each.name for each in ladder.runs] == ["cool"]
    assert [each.name for each in ladder.hot] == ["hot"]
    assert shown(run("hot", thermal_share=0.04)) is None
    assert shown(run("warm", thermal_share=0.02)).runs[0].name == "warm"
    assert "2 % slowed by heat" in shown(run("warm", thermal_share=0.02)).source
    assert "what slowed it was not recorded" in shown(run(thermal_share=None)).source


def test_the_share_of_a_run_is_that_of_all_its_samples():
    rows = [row | {"thermal_share": 0.09 if row["seqlen_q"] == 512 else 0.0} for row in run()]
    rows = [row | {"samples": 1000 if row["seqlen_q"] == 512 else 9000} for row in rows]
    (found,) = ladder_runs.runs_of(frame(rows))
    assert found.share("thermal_share") == pytest.approx(0.009)


def test_the_largest_run_is_shown_and_of_several_the_latest():
    first, second = run("first", time="2026-01-01"), run("second", time="2026-01-02")
    look = run("look", time="2026-01-03", rungs=("16",))
    ladder = shown(first, second, look)
    assert [each.name for each in ladder.runs] == ["second"]
    assert ladder.again is None, "the first is of the same card"


def test_a_run_on_another_card_stands_beside_it():
    faster = [row | {"ratio": row["ratio"] * 1.02} for row in run("second", OTHER_CARD, beside=("cudnn",))]
    ladder = shown(run("first", time="2025-01-01", beside=("cudnn",)), faster)
    assert (ladder.runs[0].name, ladder.again.name) == ("second", "first")
    lines = ladders.summary({"h100": ladder})
    assert len(lines) == 7
    assert lines["gap"].to_numpy() == pytest.approx(1 / 1.02 - 1)
    assert shown(run("first", rungs=("16",)), faster).again is None, "it lacks rungs"


def test_own_is_never_below_fixed():
    """Where the fixed configuration was the faster, it is the rung's own too, with its steps."""
    rows = run()
    for row in rows:
        if row["version"].startswith("07"):
            row["chosen_by"] = "tuner" if row["kind"] == "own" else ""
            if row["kind"] == "fixed":
                row |= {"ratio": 0.95, "config": "block_m=64,block_n=32,num_warps=4", "registers": 168}
                row |= {"round_us": made_up.round_us(row["baseline_us"] / 0.95, (row["seqlen_q"], "bf16"), "fixed 07")}
    ladder = shown(rows)
    own, fixed = line(ladder, "07"), line(ladder, "07", "fixed")
    assert own["ratio"] == fixed["ratio"] == pytest.approx(0.95)
    assert (own["chosen_by"], own["config"], own["registers"]) == ("fixed", fixed["config"], 168)
    assert line(ladder, "16")["step"] == pytest.approx(1.06 / 0.95, rel=1e-3)
    found = ladders.summary({"h100": ladder}).pivot(index="version", columns="kind", values="ratio")
    assert (found["own"] >= found["fixed"]).all()


def test_a_configuration_of_its_own_for_long_keys_is_told():
    rows = run()
    for row in rows:
        if row["version"].startswith("07") and row["kind"] == "own":
            is_long = row["seqlen_k"] >= catalog.ladder_of("forward").long_from
            chosen = {"chosen_by": "tuner", "config": "block_m=128,block_n=32"} if is_long else {"chosen_by": "default"}
            row |= chosen
    assert len({row["config"] for row in rows if row["version"].startswith("07")}) > 1
    lines = ladders.summary({"h100": shown(rows)}).query("kind == 'own'")
    said = {row.version[:2]: ladder_tables.configuration(row) for row in lines.itertuples()}
    assert said["07"] == "128x32 for long keys, tuned by length"
    assert "length" not in said["16"]


def test_the_field_stands_beside_the_ladder_without_steps():
    lines = ladders.field(ladders.summary({"h100": shown(run(beside=("triton", "cudnn")))}))
    assert list(lines["version"]) == ["cudnn", "triton"], "the fastest first"
    assert list(lines["title"]) == ["cuDNN (torch)", "Triton"]
    assert lines["step"].isna().all()
    assert list(lines["ratio"]) == pytest.approx([1.9, 1.3])


def test_sentences_of_older_files_become_columns():
    none = dict.fromkeys(("samples", "power_cap_share", "thermal_share", "other_slowdown_share"))
    notes = "power cap in 96% of samples; hardware thermal slowdown in 2% of samples; thermal slowdown in 5% of samples"
    rows = [made_up.row("16", "own", 512, **none, notes=notes), made_up.row("16", "own", 4096, **none)]
    unknown = made_up.row("16", "fixed", 512, **none, notes="clocks and power are not recorded: pip install x")
    found = completed(frame([*rows, unknown]))
    assert found[["power_cap_share", "thermal_share", "other_slowdown_share"]].iloc[:2].to_numpy().tolist() == [
        [0.96, 0.05, 0.0],
        [0.0, 0.0, 0.0],
    ]
    assert found.iloc[2][["power_cap_share", "thermal_share"]].isna().all()
    assert list(found["notes"]) == ["", "", unknown["notes"]]
    assert remarks(found[:2]) == " The GPU: power cap in 0 to 96 % of samples; thermal slowdown in 0 to 5 % of samples."
    new = frame([made_up.row("16", "own", 512)])
    assert completed(new) is new


def test_a_damaged_round_or_share_is_a_damaged_row(tmp_path):
    log = made_up.ladder(tmp_path, dtypes=("bf16",))
    text = log.path.read_text()
    log.path.write_text(text.replace(",0.9,0.0,0.0,,", ",1.9,0.0,0.0,,", 1))
    assert "power_cap_share='1.9' should be less than or equal to 1" in str(Log(log.path, LADDER).read()[1][0])
    first = text.splitlines()[1].split(",")[-1]
    log.path.write_text(text.replace(first, first.replace(" ", " -", 1), 1))
    assert "round_us=" in str(Log(log.path, LADDER).read()[1][0])


def test_what_memory_bounds_is_told_in_its_unit():
    problem = Problem(operation="decode", batch=2, num_heads=8, num_heads_k=2, seqlen_q=1, seqlen_k=512)
    timed = {"time_us": 2.0, "baseline_us": 3.0, "ratio": 1.5, "ratio_low": 1.4, "ratio_high": 1.6, "tflops": 1.0}
    latest = dict.fromkeys(("config", "registers", "spill_store_bytes", "spill_load_bytes"))
    latest |= dict.fromkeys(("run", "time", "commit", "driver", "torch"))
    found = ladders.means(pd.DataFrame([records.of_problem(problem) | timed | latest]), None)
    assert found["unit"] == "TB/s"
    assert found["rate"] == pytest.approx(problem.asked.bytes_moved(problem) / 2e6)
    assert found["official_rate"] == pytest.approx(found["rate"] / 1.5)
