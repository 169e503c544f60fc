"""A rung of the ladder, compiled for an A100 and run on the emulator, which looks for races; no GPU is needed."""

from flashladder.common.catalog import find
from flashladder.common.compiler import build_one
from flashladder.common.errors import FlashLadderError
from flashladder.common.problem.problem import Problem
from flashladder.common.studies import single

version = find("02")
artifact = build_one(version, version.config(block_n=32), "sm_80")
print(f"{artifact.version}: {artifact.registers} registers, {artifact.launch.shared_bytes} bytes of shared memory")

try:
    outcome = single.emulate(artifact, Problem(num_heads=1, seqlen_q=64, seqlen_k=64))
except FlashLadderError as fault:  # a race, or an access out of bounds: it names the lines
    raise SystemExit(f"{artifact.version}: {fault}") from None
outcome.check.require(artifact.version)  # O and the log-sum-exp, beside the exact answer

report = outcome.report
assert report is not None
print(f"no race; its output is right; {sum(report.instructions.values())} instructions of warps")
print(f"shared memory: {report.shared_wavefronts} wavefronts, {report.shared_wavefronts_ideal} without bank conflicts")
