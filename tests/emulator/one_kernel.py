"""One kernel of a rung that has several, for mutations of other ladders than the forward one."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import torch
from test_mutations import LISTED, Rung, kind_of, redundant_in

from flashladder.common import catalog, emulator
from flashladder.common.compiler import translate
from flashladder.common.compiler.sources import Sources
from flashladder.common.emulator import compile_ptx
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime.execute import on_emulator


def redundant_of(listed):
    """The names of the mutations of a rung's entries in the files of what is redundant."""
    return [name for entry in LISTED if entry["rung"] == listed for name in redundant_in(entry)]


class OneKernel(Rung):
    """A kernel of a rung, by its entry, configured for a problem that takes it round its loops, and so far as `config`
    says."""

    def __init__(self, name, entry, problem, **config):
        version = catalog.find(name)
        self.problem, self.entry = problem, entry
        self.arch = "sm_90a" if version.instruction_set == "hopper" else "sm_80"
        self.artifact = translate(version, version.config_for(problem, **config), self.arch)
        self.program = compile_ptx(self.artifact.ptx.read_text(), entry)
        self.sources = [
            version.kernel,
            *(header for header in Sources().headers(version.kernel) if header.parent.name != "ptx"),
        ]

    def run(self, program, lagging=(), entering=None):
        """The emulator's report of the kernel, and the outputs. Raises EmulatorError if it finds something wrong."""
        tensors = make_inputs(self.problem)
        tensors.poison()

        def compiled(ptx, entry):
            return program if entry == self.entry else compile_ptx(ptx, entry)

        run, watched = emulator.run, []

        def launched(kernel, *launch, **options):  # one of them is watched
            if kernel is not program:
                return run(kernel, *launch, **options)
            watched.append(run(kernel, *launch, **options, entering=entering))
            return watched[0]

        with patch.object(emulator, "compile_ptx", side_effect=compiled), patch.object(emulator, "run", launched):
            on_emulator(self.artifact, self.problem, tensors, lagging=lagging)
        outputs = tensors.outputs.values()
        return watched[0], [view.contiguous().view(torch.uint8).numpy().tobytes() for view in outputs]

    def smaller(self):
        """One head, and one tile of keys, which one CTA has. Of decode none."""
        few = {"num_heads": 1, "num_heads_k": 1, "seqlen_k": 60}
        return self.with_problem(replace(self.problem, **few)) if self.problem.operation == "backward" else None

    def is_exact(self, listed, reported=None):
        """Requires that what is listed as redundant under this name, if anything, is all that may be missing. What
        has been `reported` of another kernel is not asked, as in all_missed."""
        redundant = redundant_of(listed)
        assert self.all_missed(redundant, reported) == sorted(redundant)

    def reported(self, listed):
        """What `is_exact` requires to be found, by kind."""
        return self.counted() - Counter(map(kind_of, redundant_of(listed)))
