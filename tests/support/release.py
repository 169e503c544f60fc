"""python -m flashladder.tests.support.release: what runs on a GPU before each release, about 8 minutes on one.

All that a model calls, first as the first call of a process, each of some eighty; then again and again, in CUDA graphs,
in threads and with gradients. Exit code 1 too where a part runs no test: for want of a GPU, or of a package.
"""

import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from flashladder.common.paths import ROOT

PARTS = (
    "tests/api/test_first_calls.py::test_on_a_gpu",
    "tests/api/test_first_calls.py::test_of_a_compiled_model",
    "tests/api/test_attention_gpu.py",
    "tests/api/test_autograd.py",
    "tests/api/test_dropout.py",
    "tests/api/test_kvcache.py",
    "tests/api/test_fp8_kvcache.py",
    "tests/api/test_real_use.py",
    "tests/api/frontends/test_continuous_batching.py",
    "tests/api/frontends/test_flash_attn.py",
    "tests/api/frontends/test_generation.py",
    "tests/api/frontends/test_torch_switch.py",
    "tests/api/frontends/test_transformers_training.py",
    "tests/runtime/test_lengths.py",
    "tests/rungs/test_independent_rows.py",
)


class Passed:
    """A plugin of pytest that counts the tests of each part which ran and passed."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.counts = Counter(dict.fromkeys(parts, 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.counts.update(part for part in self.counts if report.nodeid.startswith(part))


def main(parts: Sequence[str] = PARTS) -> int:
    passed = Passed(parts)
    where = [f"--rootdir={ROOT}", *(str(ROOT / part) for part in parts)]
    code = pytest.main(["-m", "gpu", "-n", "auto", "--dist", "worksteal", *where], plugins=[passed])
    for part, count in passed.counts.items():
        print(f"{part}: {count or 'NO'} tests passed")
    return int(code) or int(not all(passed.counts.values()))


if __name__ == "__main__":
    sys.exit(main())
