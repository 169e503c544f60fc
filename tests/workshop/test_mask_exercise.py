"""The exercise of masks: its start is right and too dear, its solution solves it, and what lacks something does not."""

import pytest
import torch

from flashladder.common.console import EXIT_ERROR, run
from flashladder.common.workshop.exercises import masks
from flashladder.tools.commands import exercise as tool


def call(*words):
    return run(tool.main, tool.parser(), [masks.NAME, *words])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "faults"),
    [
        (masks.START, []),
        (masks.SOLUTION, []),
        ("true", ["row 0 sees a later key"]),
        ("k <= q", []),
        ("k <= q && k != 77", ["row 77 does not see itself"]),
        ("k <= q && (q < 9 || k != 3)", ["row 9 does not see one of the first 4 keys"]),
        (
            "k <= q && (k < 4 || q - k < 256)",
            ["row 515 sees none of 256 keys in a row, which are less than 1,024 before it"],
        ),
        (
            "k <= q && (k < 4 || q - k < 64 || q - k < 1024 && k / 64 % 5 == 0)",
            ["sees fewer keys than at the start", "sees none of 256 keys in a row"],
        ),
    ],
)
def test_what_rows_lack(mask, faults):
    found = list(masks._faults(masks._shown(mask)))
    assert len(found) == len(faults)
    assert all(words in fault for words, fault in zip(faults, found, strict=True))


def test_runs_of_marks():
    marks = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    assert masks._longest_run(marks).tolist() == [0, 2, 4, 2]


@pytest.mark.slow
def test_the_start_is_not_solved_and_the_last_hint_solves_it(tmp_path, capsys):
    folder = ("--folder", str(tmp_path))
    assert call(*folder) == 0
    assert (tmp_path / masks.MASK).read_text().strip() == masks.START
    assert masks.START in (tmp_path / masks.TASK).read_text()
    assert call(*folder) == EXIT_ERROR, "it is there already"
    assert call(*folder, "--check") == tool.EXIT_UNSOLVED
    assert "not solved yet" in capsys.readouterr().out
    for mask, code in ((masks.hint(3).splitlines()[-1], 0), ("k <= q", tool.EXIT_UNSOLVED), ("k <= p", EXIT_ERROR)):
        (tmp_path / masks.MASK).write_text(mask)
        assert call(*folder, "--check") == code, mask
    (tmp_path / masks.MASK).write_text("k <= q && q - k < 64")
    assert call(*folder, "--check") == tool.EXIT_UNSOLVED, "few blocks, and rows lack keys"
    assert "row 64 does not see one of the first 4 keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("--hint", "4"), ("--hint", "0"), ("--check", "--folder", "no_such"), ("--check", "--json")]
)
def test_what_is_refused(words, capsys):
    assert call(*words) == EXIT_ERROR
    assert capsys.readouterr().err
