"""runtime/gpu.py against a stand-in for the NVIDIA driver: which calls it makes, and what it says when they fail."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashladder.common.compiler.toolchain import find_host_compiler

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch wants the real NVIDIA driver")

HERE = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    command = [find_host_compiler(), "-x", "c", "-w", "-shared", "-fPIC", HERE / "fake_driver.c", "-ldl"]
    subprocess.run([*command, "-o", folder / "libcuda.so.1"], check=True)

    def use(*options, program="use_fake_driver.py", **environment):
        script = [sys.executable, HERE / program, folder / "kernel.cubin", *options]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), **environment}
        return subprocess.run(script, capture_output=True, text=True, env=environment)

    return use


def test_a_kernel_is_loaded_once_and_launched_with_what_was_prepared(driver):
    result = driver()
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == sorted(
        [
            "load ELF!",
            "kernel attention_forward of 0x11",
            "function of 0x22",
            "attribute 8 of 0x33: 49152",  # the maximum of dynamic shared memory
            "launch 0x33 grid 2 3 4 block 128 1 1 shared 49152 stream 0x77 q 0x1230 extra (nil)",
            "occupancy 2",
        ]
    )


def test_several_kernels_are_launched_in_order_with_the_memory_that_they_are_lent(driver):
    result = driver("several")
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if re.match("launch|lent|attribute .* launch", line)] == [
        "launch 0x33 grid 2 3 4 block 128 1 1 shared 49152 stream 0x77 q 0x1230 extra (nil)",
        "launch 0x34 grid 2 3 4 block 32 1 1 shared 0 stream 0x77 q 0x1230 extra (nil)",
        "attribute 4 of the launch: 2 1 1",  # clusters
        "attribute 6 of the launch: 1 0 0",  # may begin before the launch before it has ended
        "lent 0xa00 0xb00",
    ]


def test_a_call_reaches_the_driver_from_python_and_from_cpp(driver):
    result = driver(program="use_fake_calls.py")
    assert result.returncode == 0, result.stderr
    _, in_python, in_cpp = re.split("way .*\n", result.stdout)
    in_python = [line for line in in_python.splitlines() if "launch" in line]
    assert in_python == in_cpp.splitlines()
    clustered, clusters, after, dependent = in_python
    assert clustered.startswith("launch 0x33 grid 2 4 3 block 128 1 1 shared 49152 stream 0x77 q 0x")
    assert after.startswith("launch 0x34 grid 100 4 1 block 32 1 1 shared 16 stream 0x77 q 0x")
    assert clusters == "attribute 4 of the launch: 1 2 1"
    assert dependent == "attribute 6 of the launch: 1 0 0"


@pytest.mark.parametrize(("variable", "action"), [("FAKE_LOAD", "load"), ("FAKE_STATUS", "launch")])
def test_a_failure_names_the_kernel_the_gpu_and_the_reason(driver, variable, action):
    result = driver(**{variable: "209"})
    assert f"DeviceError: cannot {action} 02_swizzling with block_m=64: CUDA_ERROR_MADE_UP (made up)" in result.stderr
    assert "It was built for sm_90a; the device is a Made-up GPU (sm_90a, 233472 bytes" in result.stderr
