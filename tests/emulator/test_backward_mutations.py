"""The same as test_mutations.py for the backward rungs that have synchronisation of Hopper's, kernel by kernel."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
from test_mutations import LISTED, Rung

from flashladder.common import catalog, emulator
from flashladder.common.compiler import build_one
from flashladder.common.compiler.sources import Sources
from flashladder.common.emulator import compile_ptx
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

LADDER = "backward"
MAIN = "attention_backward"
# These have no synchronisation that one of the others has not, instruction by instruction, and are not asked.
ASKED, AS_IN = ("13", "16"), ("14", "15")


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

    def run(self, program, lagging=(), entering=None):
        """The emulator's report of the kernel, and the gradients. Raises EmulatorError if it finds something wrong."""
        self.tensors.poison()

        def compiled(ptx, entry):
            return program if entry == self.entry else compile_ptx(ptx, entry)

        run, watched = emulator.run, []

        def launched(kernel, *launch, **options):  # one of three kernels is watched
            if kernel is not program:
                return run(kernel, *launch, **options)
            watched.append(run(kernel, *launch, **options, entering=entering))
            return watched[0]

        with patch.object(emulator, "compile_ptx", side_effect=compiled), patch.object(emulator, "run", launched):
            on_emulator(self.artifact, self.problem, self.tensors, lagging=lagging)
        made = (self.tensors.by_name[name] for name in ("dq", "dk", "dv"))
        return watched[0], [view.contiguous().view(torch.uint8).numpy().tobytes() for view in made]


def rung(number):
    """Its main kernel."""
    return BackwardRung(catalog.find(f"{LADDER}/{number}"), MAIN)


def counted(number):
    """How often each line of source is one of these opcodes, changed in this way."""
    return Counter((opcode, line, change) for (opcode, line, _, change), _ in rung(number).mutations())


@pytest.mark.parametrize("number", AS_IN)
def test_what_is_not_asked_has_no_synchronisation_of_its_own(number):
    asked = counted(ASKED[0]) | counted(ASKED[1])
    assert counted(number) <= asked


@pytest.mark.parametrize("number", ASKED)
def test_the_loss_of_any_synchronisation_is_reported(number):
    listed = next(entry["instructions"] for entry in LISTED if entry["rung"] == f"{LADDER}/{number}")
    redundant = [(*name[:3], name[3] if len(name) > 3 else "removed") for name in listed]
    assert rung(number).all_missed(redundant) == sorted(redundant)


def test_the_loss_of_any_part_of_an_order_of_additions_is_reported():
    """What rung 19 has beside rung 16: how a CTA is told that its turn to add has come."""
    of_16 = counted("16")
    in_order = BackwardRung(catalog.find(f"{LADDER}/19"), MAIN, options={"deterministic": True})
    every = dict(in_order.mutations())
    asked = {name: each for name, each in every.items() if (*name[:2], name[3]) not in of_16}
    assert Counter((*name[:2], name[3]) for name in every.keys() - asked.keys()) <= of_16
    assert {name[0].split(".")[0] for name in asked} == {"ld", "red", "cp"}
    _, outputs = in_order.run(in_order.program)
    assert in_order.missed(asked, (), outputs) == []
