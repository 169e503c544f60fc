"""The same as test_mutations.py for the backward rungs that have synchronisation of Hopper's, kernel by kernel."""

from unittest.mock import patch

import pytest
import torch
from test_mutations import LISTED, WEAKER, Rung, is_hint

from flashladder.common import catalog, emulator
from flashladder.common.compiler import build_one
from flashladder.common.compiler.sources import Sources
from flashladder.common.emulator import compile_ptx
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

LADDER = "backward"
MAIN = "attention_backward"


class BackwardRung(Rung):
    """One kernel of a rung, and a problem whose loop goes round: twice two tiles of Q, of which the second is cut.

    Two tiles of keys: of what is added to dQ, two numbers and zero, the order does not matter.
    """

    def __init__(self, version, entry, **sizes):
        self.arch = "sm_90a"
        self.problem = Problem(
            **{"seqlen_k": 200, "head_dim": 128, "num_heads": 2, "num_heads_k": 1, **sizes},
            seqlen_q=2 * 64 - 20,
            operation=LADDER,
        )
        self.artifact = build_one(version, version.config_for(self.problem), self.arch)
        self.program = compile_ptx(self.artifact.ptx.read_text(), entry)
        self.entry, self.tensors = entry, make_inputs(self.problem)
        self.sources = [
            version.kernel,
            *(header for header in Sources().headers(version.kernel) if header.parent.name != "ptx"),
        ]

    def run(self, program, lagging=()):
        """The emulator's report, and the gradients. Raises EmulatorError if it finds something wrong."""
        self.tensors.poison()

        def compiled(ptx, entry):
            return program if entry == self.entry else compile_ptx(ptx, entry)

        with patch.object(emulator, "compile_ptx", side_effect=compiled):
            report = on_emulator(self.artifact, self.problem, self.tensors, lagging=lagging)
        made = (self.tensors.by_name[name] for name in ("dq", "dk", "dv"))
        return report, [view.contiguous().view(torch.uint8).numpy().tobytes() for view in made]


def cases():
    """Every kernel of a Hopper rung, with what is redundant in it: (opcode, line, which, change)."""
    for version in catalog.versions(ladder=LADDER):
        if version.instruction_set != "hopper":
            continue
        listed = [entry for entry in LISTED if entry["rung"] == version.address]
        names = [name for entry in listed for name in entry["instructions"]]
        redundant = [(*name[:3], name[3] if len(name) > 3 else "removed") for name in names]
        yield pytest.param(version, redundant, id=version.name)


@pytest.mark.parametrize(("version", "redundant"), list(cases()))
def test_the_loss_of_any_synchronisation_is_reported(version, redundant):
    rung = BackwardRung(version, MAIN)
    (_, outputs), *lagging = (rung.run(rung.program, schedule) for schedule in rung.schedules())
    assert all(of_lagging == outputs for _, of_lagging in lagging)
    found = list(rung.mutations())
    weaker = {name for name, _ in found if name[3] in WEAKER and (*name[:3], "removed") in redundant}
    harmless = weaker.union(redundant)
    missed = [
        name
        for name, mutation in found
        if not is_hint(name) and not rung.finds(outputs, mutation, all_schedules=name not in harmless)
    ]
    assert sorted(set(missed) - weaker) == sorted(redundant)
