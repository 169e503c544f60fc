"""Exercises: the start of each is not solved, its rung's own code solves it, and nothing that is wrong passes."""

import re
from dataclasses import replace

import pytest
import torch

from flashladder.common.compiler.sass import count
from flashladder.common.console import EXIT_ERROR, run
from flashladder.common.errors import BuildError, ConfigError
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.workshop import exercises
from flashladder.common.workshop.exercises import page
from flashladder.tools.commands import exercise as tool

pytestmark = pytest.mark.slow

ALL = exercises.exercises()
of_each = pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.version.name)


def changed(exercise, folder, *replacements):
    """The start with these pieces of text replaced, written to a file."""
    text = exercise.start
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    (folder / "kernel.cu").write_text(text)
    return folder / "kernel.cu"


@of_each
def test_the_start_is_right_and_not_solved_and_the_rungs_own_code_solves_it(exercise):
    start = exercises.grade(exercise, exercise.start_kernel)
    assert bool(start.faults) == bool(exercise.fault)
    assert start.reached == bool(exercise.fault and start.own)
    assert not start.solved
    assert start.own in (start.start, {})
    rung = exercises.grade(exercise, exercise.version.kernel)
    assert rung.solved
    assert rung.own == rung.rung
    assert rung.own[exercise.goal] <= rung.bound
    assert rung.bound < start.start[exercise.goal] or exercise.fault


@of_each
def test_hints_end_with_the_rungs_own_change(exercise):
    assert len(exercise.own_hints) >= 2
    added = [line[1:] for line in exercise.hints[-1].splitlines() if re.match(r"\+(?!\+)", line)]
    assert added
    assert set(added) <= set(exercise.version.kernel.read_text().splitlines())


@pytest.mark.parametrize("name", ["00", "backward/03", "backward/20", "decode/01", "mla/02"])
def test_the_start_lies_in_a_folder_of_its_own_with_all_that_it_reads(name, tmp_path):
    exercise = exercises.find(name)
    start = exercises.grade(exercise, exercise.lay_out(tmp_path / "mine"))
    assert start.own == start.start or exercise.fault
    assert not start.solved


def test_half_of_an_idea_is_not_enough_where_the_goal_is_exact(tmp_path):
    exercise = exercises.find("02")
    kernel = changed(exercise, tmp_path, ("KVTile = RowMajor", "KVTile = Swizzled"))
    found = exercises.grade(exercise, kernel)
    assert found.faults == ()
    assert 0 < found.own["bank_conflicts"] < found.start["bank_conflicts"]
    assert not found.solved


def test_a_fault_that_is_covered_up_is_not_solved(tmp_path):
    """A factor that may not grow is finite, and wrong: what was summed with a larger m is too much then."""
    exercise = exercises.find("00")
    kernel = changed(exercise, tmp_path, ("exp2f(m - block_max)", "fminf(1.0f, exp2f(m - block_max))"))
    found = exercises.grade(exercise, kernel)
    assert found.reached
    assert found.faults


def test_a_fault_is_not_mended_by_a_barrier_more(tmp_path):
    exercise = exercises.find("01")
    kernel = changed(exercise, tmp_path, ("        // S = Q K^T", "        __syncthreads();\n        // S = Q K^T"))
    found = exercises.grade(exercise, kernel)
    assert found.faults == ()
    assert not found.reached


def test_a_stride_of_another_problem_is_not_solved(tmp_path):
    exercise = exercises.find("16")
    found = exercises.grade(exercise, changed(exercise, tmp_path, ("params.k_stride.row", "2 * head_dim + 8")))
    assert found.faults


@pytest.mark.parametrize("fence", ["__threadfence();", "__threadfence_block();"])
def test_half_of_two_fences_is_not_solved(tmp_path, fence):
    exercise = exercises.find("decode/05")
    count = "    if (threadIdx.x == 0) is_last"
    kernel = changed(exercise, tmp_path, (count, f"    {fence}\n{count}"))
    found = exercises.grade(exercise, kernel)
    assert "race on global memory" in found.faults[0]


def test_a_race_is_not_solved(tmp_path):
    exercise = exercises.find("02")
    kernel = changed(exercise, tmp_path, ("RowMajor", "Swizzled"), ("__syncthreads();", ""))
    found = exercises.grade(exercise, kernel)
    assert "race" in found.faults[0]
    assert not found.solved


def test_a_tile_that_is_not_waited_for_is_not_solved(tmp_path):
    exercise = exercises.find("26")
    text = exercise.version.kernel.read_text()
    wait = "shared.v_full.wait(parity);"
    assert wait in text
    (tmp_path / "kernel.cu").write_text(text.replace(wait, ""))
    found = exercises.grade(exercise, tmp_path / "kernel.cu")
    assert "race" in found.faults[0]
    assert not found.solved


def test_a_wrong_output_is_not_solved_though_the_goal_is_reached(tmp_path):
    exercise = exercises.find("06")
    found = exercises.grade(exercise, changed(exercise, tmp_path, ("scale(s, params.softmax_scale * log2_e);", "")))
    assert found.reached
    assert found.faults
    assert not found.solved


@pytest.mark.parametrize(
    ("name", "softmax", "update"),
    [("17", "OnlineSoftmax<warp_rows>", "s, o"), ("18", "LazySoftmax<dtype, warp_rows>", "s, o, j")],
)
def test_what_is_right_on_easy_inputs_alone_is_not_solved(tmp_path, name, softmax, update):
    """Each block with the m of the first one, whatever its scores are."""
    exercise = exercises.find(name)
    never = "template <class Softmax> struct Never : Softmax { using Softmax::exponentiate; };\n"
    first = "using namespace config;\n"
    changes = [(first, first + never), (f"{softmax} softmax{{", f"Never<{softmax}> softmax{{")]
    kernel = changed(
        exercise, tmp_path, *changes, (f"softmax.update({update});", "softmax.exponentiate(s, softmax.l);")
    )
    found = exercises.grade(exercise, kernel)
    assert found.reached
    assert found.faults
    assert all("(inputs: large_values, seed " in fault for fault in found.faults)


def test_work_for_known_inputs_alone_is_not_solved(tmp_path):
    """A kernel that looks whether its inputs are those of seed 0, of each family."""
    exercise = exercises.find("02")
    problems = [replace(exercise.problem, family=family) for family in ("normal", *exercise.families)]
    known = [int(make_inputs(problem).q.flatten()[0].view(torch.uint16)) for problem in problems]
    seen = " && ".join(f"first != {bits}u" for bits in known)
    look = f"const unsigned first = *reinterpret_cast<const unsigned short *>(params.q); if ({seen}) return;"
    head, brace, body = exercise.version.kernel.read_text().partition("params) {\n")
    (tmp_path / "kernel.cu").write_text(head + brace + look + body)
    found = exercises.grade(exercise, tmp_path / "kernel.cu")
    assert found.reached
    assert any("were not written" in fault for fault in found.faults), found.faults


def test_without_copies_counts_all_mmas_of_a_loop_that_waits():
    exercise = exercises.find("03")
    found = exercises.grade(exercise, exercise.start_kernel)
    mmas = count(_loop(exercise), ("HMMA",))
    assert found.start["idle_copies"] == mmas
    assert found.rung["idle_copies"] < mmas / 4


def _loop(exercise):
    from flashladder.common.compiler import build_one
    from flashladder.common.compiler.sass import read

    return read(build_one(exercise.base, exercise.base.config(), "sm_90a")).loop


def test_the_tool_begins_checks_and_hints(tmp_path, capsys):
    def call(*arguments):
        code = run(tool.main, tool.parser(), ["02", "--folder", str(tmp_path / "mine"), *arguments])
        return code, capsys.readouterr()

    exercise = exercises.find("02")
    assert call("--check")[0] == EXIT_ERROR, "nothing to check yet"
    code, said = call()
    assert code == 0
    kernel = tmp_path / "mine" / page.KERNEL
    assert kernel.read_text() == exercise.start
    task = (tmp_path / "mine" / page.TASK).read_text()
    assert task in said.out
    assert "swizzl" not in f"{task} {exercise.folder}".lower(), "the rung's name is the answer"
    code, said = call()
    assert code == EXIT_ERROR
    assert "is there already" in said.err
    code, said = call("--check")
    assert code == tool.EXIT_UNSOLVED
    assert "not solved yet" in said.out
    kernel.write_text(exercise.version.kernel.read_text())
    code, said = call("--check")
    assert code == 0
    assert "not solved" not in said.out
    assert "hint 1 of 4" in call("--hint", "1")[1].out
    assert "using KVTile = Swizzled" in call("--hint", "4")[1].out
    for number in ("0", "5"):
        code, said = call("--hint", number)
        assert code == EXIT_ERROR
        assert "hints 1 to 4" in said.err


def test_the_list_has_every_exercise(capsys):
    assert run(tool.main, tool.parser(), []) == 0
    said = capsys.readouterr().out
    assert all(f"  {exercise.version.address} " in said for exercise in ALL)
    assert run(tool.main, tool.parser(), ["--check"]) == EXIT_ERROR, "of which exercise?"


def test_a_kernel_that_does_not_compile_says_where(tmp_path):
    exercise = exercises.find("02")
    with pytest.raises(BuildError, match=r"kernel\.cu\(\d+\): error"):
        exercises.grade(exercise, changed(exercise, tmp_path, ("scale(s", "scalee(s")))


@pytest.mark.parametrize("asked", ["04", "99"])
def test_an_unknown_exercise_names_those_there_are(asked):
    with pytest.raises(ConfigError, match=rf"no exercise {asked}.* [Tt]here are those of 00, 01"):
        exercises.find(asked)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("task: t\nhints: [a]", "the key goal is missing"),
        ("task: t\nhints: [a]\ngoal: speed", "goal=speed is not one of bank_conflicts"),
        ("task: t\nhints: [a]\ngoal: fp32\nproblem: {rows: 3}", "problem: rows is no field of a problem"),
        ("task: t\nhints: [a]\ngoal: fp32\nfamilies: [odd]", "odd"),
        ("task: [", "while parsing"),
    ],
)
def test_a_damaged_declaration_is_told(tmp_path, text, complaint):
    ladder = exercises.find("02").version.directory.parent
    copied = tmp_path / ladder.name
    for name in ("01_base", "02_swizzling"):
        (copied / name).mkdir(parents=True)
        for file in ("kernel.cu", "version.yaml"):
            (copied / name / file).write_text((ladder / name / file).read_text())
    (copied / "02_swizzling" / exercises.FILE).write_text(text)
    with pytest.raises(ConfigError, match=complaint) as raised:
        exercises.find("02", tmp_path)
    assert exercises.FILE in str(raised.value)
    (copied / "02_swizzling" / exercises.FILE).rename(copied / "01_base" / exercises.FILE)
    (copied / "01_base" / exercises.FILE).write_text("task: t\nhints: [a]\ngoal: fp32")
    with pytest.raises(ConfigError, match="there is none with another kernel"):
        exercises.find("01", tmp_path)
