"""The first call of a process gives the bits of further ones, and the exact answer: tests/first_calls has the table."""

import os
import signal
import subprocess
import time

import pytest
import torch

from flashladder.tests.first_calls.forks import each_in_a_fork
from flashladder.tests.first_calls.table import GPU, ROWS
from flashladder.tests.first_calls.trial import Call, differences, errors
from flashladder.tests.support import triton_process


def require(module, *arguments):
    """It ends without a fault; else what it says is the failure."""
    name = f"flashladder.tests.first_calls.{module}"
    ended = triton_process.run("-m", name, *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
def test_on_the_emulator():
    require("run", "cpu")


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu():
    require("run", "cuda")


@pytest.mark.gpu
@pytest.mark.alone
def test_of_a_compiled_model():
    pytest.importorskip("transformers")
    require("qwen3")


def test_the_table_fits_into_minutes_of_a_gpu():
    assert len({row.problem(GPU) and row.name for row in ROWS}) == len(ROWS) <= 83


def test_a_call_that_differs_or_is_wrong_is_named():
    o = torch.arange(6).bfloat16() / 8
    other = o.clone()
    other[2] += 0.5
    calls = [
        Call({"o": o}, "by Python; ready: 48"),
        Call({"o": o.clone()}, ""),
        Call({"o": other}, "by C++; ready: 48"),
    ]
    assert differences("o", calls) == [
        "call 3 differs from call 1 in 1 of 6 elements of o, the largest difference 0.5. Call 1 by Python; ready: 48. "
        "Call 3 by C++; ready: 48"
    ]
    assert errors("o", calls, o.double(), 0.01) == [
        "call 3 is wrong in 1 of 6 elements of o, the largest error 0.5, tolerance 0.01. It went by C++; ready: 48"
    ]
    assert not errors("o", calls, o.double(), 0.5)
    unwritten = [Call({"o": torch.full_like(o, torch.nan)}, "")] * 2
    assert not differences("o", unwritten)
    assert [line.partition(" elements")[0] for line in errors("o", unwritten, o.double(), 0.5)] == [
        "call 1 is wrong in 6 of 6",
        "call 2 is wrong in 6 of 6",
    ]


def _end(how):
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(60)
        case "raises":
            raise ValueError("a cause")
    return how


def test_what_becomes_of_a_process_is_said():
    ends = {task: (made, how) for task, made, how in each_in_a_fork(_end, ("well", "killed", "hangs", "raises"), 2, 1)}
    assert ends.pop("well") == ("well", "")
    assert not any(made for made, _ in ends.values())
    assert ends["killed"][1] == "died of signal 9"
    assert "Timeout" in ends["hangs"][1]
    assert ends["raises"][1].endswith("ValueError: a cause")
