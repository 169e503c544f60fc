"""A rung that stands ready on a GPU, for calls that come often: what does not depend on the tensors is done once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashladder.common.catalog import Version
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import fast_path, gpu, plan
from flashladder.common.runtime.launch import PROBLEMS_KEPT
from flashladder.common.runtime.workspaces import lender

_NOT_ASKED, _ASKED_ONCE = plan.Plan(), plan.Plan()


class Call:
    """The kernels of an artifact on a GPU, for problems like the given one; a call launches them on torch's current
    stream.

    Any thread may call it, and a CUDA graph may capture it.
    """

    def __init__(self, rung: Version, artifact: Artifact, problem: Problem, device: torch.device) -> None:
        self._device, self._index = device, plan.index_of(device)
        with torch.cuda.device(device):
            self._kernel = gpu.load(artifact)
            self._lenders = [lender(self._kernel, each, device) for each in self._kernel.launcher.workspaces]
            torch.cuda.synchronize()  # counters are zero, for any stream
            self.plan = plan.plan(rung, self._kernel, self._lenders, problem, device)
        self._rung = rung
        self._plans: dict[Problem, plan.Plan | None] = {}
        fast_path.prepare()

    def launch_fast(self, tensors: Sequence[torch.Tensor | None], softmax_scale: float) -> bool:
        """Whether C++ launched on these tensors, in the operation's order; else nothing is done, and `__call__` may say
        what is wrong with them.
        """
        return self.plan is not None and self.launch_by(self.plan, tensors, softmax_scale)

    def launch_by(self, planned: plan.Plan, tensors: Sequence[torch.Tensor | None], softmax_scale: float) -> bool:
        """The same by a plan of its own for these tensors, as `planned` gives it."""
        if fast_path.extension is None:
            return False
        if torch.cuda.current_device() == self._index:
            return bool(fast_path.extension.launch(planned, tuple(tensors), softmax_scale))
        with torch.cuda.device(self._device):
            return bool(fast_path.extension.launch(planned, tuple(tensors), softmax_scale))

    def planned(self, problem: Problem, now: bool = True) -> plan.Plan | None:
        """A plan for one problem that the rung takes; None where there is none.

        It is made at the second call for it: a problem that never comes again is not worth one. Without `now`, it is
        not made.
        """
        found = self._plans.get(problem, _NOT_ASKED)
        if found is _NOT_ASKED and now:
            while len(self._plans) >= PROBLEMS_KEPT:
                self._plans.pop(next(iter(self._plans)), None)
            self._plans[problem] = _ASKED_ONCE
        elif found is _ASKED_ONCE and now:
            self._plans[problem] = found = self._made(problem)
        return None if found is _NOT_ASKED or found is _ASKED_ONCE else found

    def _made(self, problem: Problem) -> plan.Plan | None:
        with torch.cuda.device(self._device):
            return plan.plan(self._rung, self._kernel, self._lenders, problem, self._device, alone=True)

    def launch(self, problem: Problem, tensors: Tensors) -> None:
        """As `__call__`, in C++ where a plan for the problem says all: for problems that the rung takes."""
        if planned := self.planned(problem):
            ordered = [tensors.by_name.get(name) for name in problem.tensors]
            if self.launch_by(planned, ordered, problem.softmax_scale):
                return
        self(problem, tensors)

    def __call__(self, problem: Problem, tensors: Tensors) -> None:
        """Launches them for any problem and any tensors that kernels take.

        UnsupportedProblemError for others, and for those of another problem; DeviceError where the driver refuses.
        """
        with torch.cuda.device(self._device):
            launcher = self._kernel.launcher
            launches = launcher.launches(problem, tensors, gpu.num_sms())
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            needed = launcher.workspace_bytes(problem)  # the allocator waits until the stream is done
            lent = [lend(stream, num_bytes) for lend, num_bytes in zip(self._lenders, needed, strict=True)]
            self._kernel.prepare(launches, lent)()
