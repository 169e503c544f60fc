"""One kernel of a rung that has several, for mutations of other ladders than the forward one."""

from unittest.mock import patch

import torch
from test_mutations import LISTED, Rung, redundant_in

from flashladder.common import catalog, emulator
from flashladder.common.compiler import translate
from flashladder.common.compiler.sources import Sources
from flashladder.common.emulator import compile_ptx
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime.execute import on_emulator


class OneKernel(Rung):
    """A kernel of a rung, by its entry, and a problem that takes it round its loops."""

    def __init__(self, name, entry, problem):
        version = catalog.find(name)
        self.problem, self.entry = problem, entry
        self.arch = "sm_90a" if version.instruction_set == "hopper" else "sm_80"
        self.artifact = translate(version, version.config_for(problem), self.arch)
        self.program = compile_ptx(self.artifact.ptx.read_text(), entry)
        self.tensors = make_inputs(problem)
        self.sources = [
            version.kernel,
            *(header for header in Sources().headers(version.kernel) if header.parent.name != "ptx"),
        ]

    def run(self, program, lagging=(), entering=None):
        """The emulator's report of the kernel, and the outputs. Raises EmulatorError if it finds something wrong."""
        self.tensors.poison()

        def compiled(ptx, entry):
            return program if entry == self.entry else compile_ptx(ptx, entry)

        run, watched = emulator.run, []

        def launched(kernel, *launch, **options):  # one of them is watched
            if kernel is not program:
                return run(kernel, *launch, **options)
            watched.append(run(kernel, *launch, **options, entering=entering))
            return watched[0]

        with patch.object(emulator, "compile_ptx", side_effect=compiled), patch.object(emulator, "run", launched):
            on_emulator(self.artifact, self.problem, self.tensors, lagging=lagging)
        outputs = self.tensors.outputs.values()
        return watched[0], [view.contiguous().view(torch.uint8).numpy().tobytes() for view in outputs]

    def is_exact(self, listed):
        """Requires that what redundant.yaml lists under this name, if anything, is all that may be missing."""
        redundant = [name for entry in LISTED if entry["rung"] == listed for name in redundant_in(entry)]
        assert self.all_missed(redundant) == sorted(redundant)
