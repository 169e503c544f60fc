"""The oldest transformers that setup.py takes: tests of models run with it in a process of their own.

The newest is that of constraints.txt, with which all other tests run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashladder.common.packages import OLDEST
from flashladder.common.paths import ROOT, cache_dir

pytest.importorskip("transformers", reason="transformers is not installed (the extra dev brings it)")
pytestmark = pytest.mark.slow

# With what it needs in releases that the newest has not.
PACKAGES = [f"transformers=={OLDEST['transformers']}.0", "huggingface-hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9"]
HERE = Path(__file__).parent
MODELS = ("Llama", "Mistral", "Llama4Text", "ModernBert")
TESTS = [
    *(f"test_architectures.py::test_it_runs_on_ours_or_says_why[{name}]" for name in MODELS),
    "test_transformers_masks.py::test_masks_are_those_of_sdpa",
    "test_transformers_masks.py::test_packed_masks_are_those_of_sdpa",
    "test_transformers.py::test_a_sliding_window_in_a_static_cache[cpu]",
    "test_transformers_training.py::test_a_compiled_model_trains[cpu-Qwen3-ones-forward]",
    "test_transformers_training.py::test_a_compiled_model_trains[cpu-Mistral-packed-packed]",
    "test_generation.py::test_left_padding_with_a_static_cache[cpu]",
]


@pytest.fixture(scope="module")
def oldest():
    """The folder that has it; pip brings it once."""
    folder = cache_dir() / "tests" / "-".join(PACKAGES).replace("==", "-")
    if not (whole := folder / "whole").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade"]
        done = subprocess.run([*command, "--target", str(folder), *PACKAGES], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot bring {PACKAGES[0]}: {done.stderr.strip().splitlines()[-1]}")
        whole.touch()
    return folder


def test_models_run_on_ours_with_the_oldest(oldest):
    path = os.pathsep.join([str(oldest), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = (
        "import sys, pytest, transformers; "
        f"assert transformers.__version__ == '{OLDEST['transformers']}.0', transformers.__version__; "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-q", "-x", "-m", "", "-p", "no:xdist", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    places = [str(HERE / test) for test in TESTS]
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code, *options, *places]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TESTS)} passed" in done.stdout


def test_the_docs_name_the_oldest():
    docs = ROOT / "docs"
    assert f"transformers) {OLDEST['transformers']} or later" in (docs / "models.md").read_text()
    assert f"with torch {OLDEST['torch']} or later" in (docs / "install.md").read_text()
