"""The exercise of masks: one that shows rows as much as another does, at fewer blocks. It is graded without a GPU.

A mask is right where its rows see what the task asks for, by the exact evaluation. It costs the blocks that the kernels
of rung 52 list on the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rich.table import Table

from flashladder.common.api import mask_check
from flashladder.common.api.mask_blocks import EMPTY, PARTIAL, MaskBlocks, mask_blocks
from flashladder.common.errors import ConfigError, ResultsError
from flashladder.common.escape import Markdown
from flashladder.common.expression import Mods
from flashladder.common.problem.modified import modified
from flashladder.common.problem.problem import Problem
from flashladder.common.report.tables import facts
from flashladder.common.report.templating import render

NAME, MASK, TASK = "mask", "mask.txt", "TASK.md"  # of the exercise; in its folder
FOLDER = Path("exercises", NAME)
ROWS, FIRST, REACH, GAP = (
    2048,
    4,
    1024,
    256,
)  # the task's: rows and keys, keys that all see, how far back, and how dense
START = f"k <= q && (k < {FIRST} || q - k < {REACH} && (q - k) % 4 == 0)"
SOLUTION = f"k <= q && (k < {FIRST} || q - k < 64 || q - k < {REACH} && k / 64 % 4 == 0)"
HINTS = (
    "`flashladder mask` shows the blocks of a mask. Which ones does a tile of 192 rows see, if each of its rows skips "
    "three keys of four?",
    "A block is skipped where no row of a tile sees any of its keys. Let the rows of a tile agree on the keys that they"
    " skip, and let these fill whole blocks.",
    f"This mask costs {{blocks}}:\n\n    {SOLUTION}",
)
_PROBLEM = Problem(batch=1, num_heads=1, num_heads_k=1, seqlen_q=ROWS, seqlen_k=ROWS, head_dim=128)


@dataclass(frozen=True)
class MaskGrade:
    """What became of a mask. Faults are in words."""

    own: MaskBlocks
    faults: tuple[str, ...]

    @property
    def reached(self) -> bool:
        """Whether it costs few blocks, be it right or wrong."""
        return computed(self.own) <= bound()

    @property
    def solved(self) -> bool:
        return self.reached and not self.faults


def grade(mask: str) -> MaskGrade:
    """The grade of an expression. ExpressionError for text that is none."""
    shown = _shown(mask)
    return MaskGrade(mask_blocks(_PROBLEM, mask), tuple(_faults(shown)))


def computed(found: MaskBlocks) -> int:
    """The blocks that are not skipped."""
    (only,) = found.lists
    return only.classes.size - only.count(EMPTY)


@cache
def bound() -> int:
    """The most that a mask may cost: half of the way from the start to the solution."""
    return sum(computed(mask_blocks(_PROBLEM, mask)) for mask in (START, SOLUTION)) // 2


def begin(folder: Path) -> MaskGrade:
    """Writes the start and the task into a new folder; gives the grade of the start.

    ResultsError where the folder holds a mask already.
    """
    path = folder / MASK
    if path.exists():
        raise ResultsError(f"{path} is there already: grade it with --check, or name another folder with --folder")
    start = grade(START)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(START + "\n")
    sizes = {"rows": ROWS, "first": FIRST, "reach": REACH, "gap": GAP}
    words = {"exercise": NAME, "mask": MASK, "start": Markdown(START)}
    goal = {"blocks": computed(start.own), "bound": bound(), "hints": len(HINTS)}
    (folder / TASK).write_text(render("mask_exercise.md.j2", **sizes, **words, **goal) + "\n")
    return start


def hint(number: int) -> str:
    """One of HINTS, from the vaguest, 1, to the solution. ConfigError for another number."""
    if not 1 <= number <= len(HINTS):
        raise ConfigError(f"exercise {NAME} has the hints 1 to {len(HINTS)}, not {number}")
    text = HINTS[number - 1]
    return text.format(blocks=f"{computed(mask_blocks(_PROBLEM, SOLUTION))} blocks") if number == len(HINTS) else text


def verdict(found: MaskGrade) -> Table:
    """Right or wrong, and how far the goal is."""
    (only,) = found.own.lists
    cost = f"{computed(found.own):,} blocks, {only.count(PARTIAL):,} of them partial; at most {bound():,} wanted"
    right = "\n".join(found.faults) or "yes"
    return facts(
        f"Exercise {NAME}", {"right": right, "cost": cost, "grade": "solved" if found.solved else "not solved yet"}
    )


def _shown(mask: str) -> torch.Tensor:
    """Which keys each row sees, (rows, keys)."""
    problem, _ = mask_check.of_problem(_PROBLEM, mask, None, {})
    scores = modified(Mods.parse(problem.mods), {}, torch.zeros(1, ROWS, ROWS), 0, 0, (ROWS, ROWS))
    return ~scores[0].isneginf()


def _faults(shown: torch.Tensor) -> Iterator[str]:
    """What the task asks for and the rows do not see, each by the first such row."""
    q, k = torch.arange(ROWS)[:, None], torch.arange(ROWS)
    past = k <= q
    near = past & (q - k < REACH)
    lacking = {
        "sees a later key": (shown & ~past).any(1),
        "does not see itself": ~shown.diagonal(),
        f"does not see one of the first {FIRST} keys": (past & (k < FIRST) & ~shown).any(1),
        "sees fewer keys than at the start": shown.sum(1) < _shown(START).sum(1),
        f"sees none of {GAP} keys in a row, which are less than {REACH:,} before it": _longest_run(near & ~shown)
        >= GAP,
    }
    for what, rows in lacking.items():
        if rows.any():
            yield f"row {int(rows.nonzero()[0])} {what}"


def _longest_run(marks: torch.Tensor) -> torch.Tensor:
    """How many of a row's marks lie side by side, at most."""
    counts = marks.cumsum(1)
    return (counts - torch.where(marks, 0, counts).cummax(1).values).amax(1)
