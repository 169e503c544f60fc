"""The limits of a kernel on a GPU: where Nsight Compute found its warps, and what they waited for there.

A sample belongs to the instruction that the warp stands at, or, where it waits for a result, to the instruction that
makes it. As warps wait side by side, the share of a limit's samples is the most by which the launch could be shorter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flashladder.common.catalog import Version
from flashladder.common.compiler.sass import SassInstruction
from flashladder.common.compiler.sass.instruction import NO_BARRIER
from flashladder.common.errors import DeviceError
from flashladder.common.predict.limits.diagnosis import MICROSECONDS, Diagnosis, Limit, by_line, ranked
from flashladder.common.predict.limits.kinds import TENSOR, limit_of
from flashladder.common.predict.ncu import Counted
from flashladder.common.predict.profiling import ProfiledRung

_FOR_RESULTS = ("long", "short")  # how the reasons begin of a wait for another instruction's result
_AT_BARRIERS = ("barrier", "membar")
_CONFLICTING = ("LDSM", "LDS", "STS", "STSM")

Weighted = list[tuple[SassInstruction, float]]


def sample(version: Version, rung: ProfiledRung) -> Diagnosis:
    """The diagnosis of a profiled rung; DeviceError where ncu took no samples."""
    if not rung.profile.samples:
        raise DeviceError(f"ncu found no warp of {version.name} at work: profile a larger problem")
    parts = _parts(rung.code.instructions, rung.profile.instructions)
    total = sum(weight for part in parts.values() for _, weight in part)
    limits = [
        Limit(name, rung.time_us * (1 - sum(weight for _, weight in part) / total), by_line(part))
        for name, part in parts.items()
        if name not in ("", TENSOR)
    ]
    busy = rung.agreement("busy %", "tensor") or rung.agreement("busy %", "wgmma")
    tensor = rung.time_us * busy.measured / 100 if busy else 0.0
    return Diagnosis(version, rung.code, rung.profile.device, rung.time_us, MICROSECONDS, tensor, ranked(limits))


def _parts(instructions: Sequence[SassInstruction], counted: Sequence[Counted]) -> dict[str, Weighted]:
    """The samples, by limit and by the instruction at which they were taken."""
    has_tensor_cores = any(limit_of(instruction, True) == TENSOR for instruction in instructions)
    makers: dict[int, int] = {}  # of a scoreboard: the latest instruction that sets it
    parts: dict[str, Weighted] = defaultdict(list)
    for number, (instruction, samples) in enumerate(zip(instructions, counted, strict=False)):
        waited = [makers[bit] for bit in range(6) if instruction.control.wait_mask >> bit & 1 and bit in makers]
        for reason, times in samples.stalls.items():
            cause = max(waited, default=number) if reason.startswith(_FOR_RESULTS) else number
            name = "copies" if reason in _AT_BARRIERS else limit_of(instructions[cause], has_tensor_cores)
            conflicts = _conflict_share(instructions[cause], counted[cause]) * times
            parts["bank_conflicts"].append((instruction, conflicts))
            parts[name].append((instruction, times - conflicts))
        for scoreboard in (instruction.control.write_barrier, instruction.control.read_barrier):
            if scoreboard != NO_BARRIER:
                makers[scoreboard] = number
    return {name: part for name, part in parts.items() if any(weight for _, weight in part)}


def _conflict_share(instruction: SassInstruction, counted: Counted) -> float:
    """The part of an access's wavefronts that are bank conflicts."""
    if instruction.base not in _CONFLICTING or not counted.shared_wavefronts:
        return 0.0
    return max(0.0, 1 - counted.shared_wavefronts_ideal / counted.shared_wavefronts)
