"""Each barrier, commit and wait of every rung is taken out in turn: the emulator reports it, or redundant.yaml says why
nothing is lost."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from flashladder.common import catalog, emulator
from flashladder.common.build import build_one
from flashladder.common.emulator.machine import compile_ptx
from flashladder.common.emulator.mutate import synchronisations, without
from flashladder.common.errors import EmulatorError
from flashladder.common.problem import Problem, make_inputs
from flashladder.common.run.launch import pack, steps

ARCH = "sm_80"
# The compiler repeats the loop over anchored blocks behind the second pass, which leaves none to it.
LOOP_LEFT_IDLE = {"18", "19", "20", "21", "22"}
REDUNDANT = yaml.safe_load(Path(__file__).with_name("redundant.yaml").read_text())


def cases():
    """Every rung that can hold Q in registers, where nothing is redundant, and the configurations of redundant.yaml."""
    for version in catalog.versions():
        if any(entry["rung"] == version.number and "q_fragments" not in entry["config"] for entry in REDUNDANT):
            continue  # Q is never held
        held = {"q_fragments": 0} if "q_fragments" in version.choices else {}
        config = {"block_m": min(version.choices["block_m"].values), **held}
        yield pytest.param(version, config, [], id=version.name)
    for entry in REDUNDANT:
        version = catalog.find(entry["rung"])
        expected = [tuple(name) for name in entry["instructions"]]
        yield pytest.param(version, entry["config"], expected, id=f"{version.name}-redundant")


class Rung:
    """A rung's program and a problem of a few tiles."""

    def __init__(self, version, overrides):
        default = version.config(**overrides)
        rows, keys = max(default.block_m, 64), max(default.block_n, 64)
        self.problem = Problem(seqlen_q=rows, seqlen_k=3 * keys, head_dim=default.head_dim, dtype=default.dtype)
        self.artifact = build_one(version, version.config_for(self.problem, **overrides), ARCH)
        self.program = compile_ptx(self.artifact.ptx.read_text(), self.artifact.entry)
        self.lines = version.kernel.read_text().splitlines()

    def run(self, program):
        """The emulator's report. Raises EmulatorError if it finds something wrong."""
        tensors = make_inputs(self.problem)
        # Scores far apart, but in the first warp alone: no way through the softmax is left out, and warps disagree.
        tensors.k[:, : self.problem.seqlen_k // 2] *= 100
        tensors.q[:, 16:] /= 1000
        views = {name: getattr(tensors, name) for name in ("q", "k", "v", "o", "lse")}
        memory, addresses = emulator.GlobalMemory(), {}
        for name, view in views.items():
            raw, is_input = view.contiguous().view(torch.uint8).numpy(), name in "qkv"
            addresses[name] = memory.add(name, raw, readonly=is_input, initialised=is_input)
        params = pack(self.problem, tensors, addresses)
        (step,) = steps(self.artifact, self.problem, params, num_sms=1)
        return emulator.run(program, params, step.grid, step.num_threads, step.shared_bytes, memory)

    def mutations(self):
        """(name, instruction) of all that can be taken out; the name: opcode, line of kernel.cu, which of its kind."""
        seen = Counter()
        for instruction in synchronisations(self.program):
            _, line = instruction.source[-1]
            kind = instruction.opcode, self.lines[line - 1].split("//")[0].strip()
            seen[kind] += 1
            yield (*kind, seen[kind]), instruction


@pytest.mark.parametrize(("version", "overrides", "redundant"), list(cases()))
def test_the_loss_of_any_synchronisation_is_reported(version, overrides, redundant):
    rung = Rung(version, overrides)
    reached = rung.run(rung.program).reached
    mutations, missed = list(rung.mutations()), []
    idle = [name for name, instruction in mutations if instruction.index not in reached]
    assert len(mutations) - len(idle) >= 2
    assert not idle or version.number in LOOP_LEFT_IDLE
    for name, instruction in mutations:
        if name in idle:
            continue
        try:
            rung.run(without(rung.program, instruction))
        except EmulatorError:
            continue
        missed.append(name)
    assert sorted(missed) == sorted(redundant)
