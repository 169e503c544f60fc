"""Runs every rung, or those named, once on the GPU and checks it; runtime/test_gpu.py puts it under compute-sanitizer.

Tensors get no guards here, so that an access outside one leaves its allocation, and is found.
"""

import sys

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.measure.contest import hold
from flashladder.common.problem import buffers
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.gpu import device_arch, require_gpu

PROBLEM = Problem(batch=2, num_heads=2, seqlen_q=256)


def main() -> int:
    """The number of rungs that gave a wrong output."""
    require_gpu()
    buffers._GUARD_ROWS = 0
    named = [catalog.find(name) for name in sys.argv[1:]] or catalog.versions()
    rungs = [version for version in named if version.takes(PROBLEM)]
    built = build([BuildRequest(version, version.config_for(PROBLEM), device_arch()) for version in rungs])
    wrong = 0
    for artifact in built:
        print(f"=== {artifact.version}", flush=True)
        check = hold(PROBLEM, {artifact.version: artifact}, [], None).checks[artifact.version]
        print("\n".join(check.faults) or "right", flush=True)
        wrong += not check.passed
    return wrong


if __name__ == "__main__":
    sys.exit(main())
