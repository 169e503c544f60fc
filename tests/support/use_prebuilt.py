"""Makes calls of an installed package, of the kinds that a wheel is built for; tools/test_wheel.py runs this."""

import itertools
import sys
import time
from pathlib import Path
from random import Random

import fake_cuda  # beside this file: an installed package has no tests
import pytest
import torch
import usual_calls

import flashladder
from flashladder.common.api import attention
from flashladder.common.errors import ToolchainError
from flashladder.common.runtime import ready

if sys.argv[2:] == ["quarter"]:
    usual_calls.DTYPES, usual_calls.HEAD_DIMS = (torch.bfloat16,), (128,)
driver = fake_cuda.install(pytest.MonkeyPatch(), sys.argv[1])
ready.is_gpu = lambda tensor: True
begin = time.perf_counter()
for dtype, head_dim, causal, return_lse in itertools.product(
    usual_calls.DTYPES, usual_calls.HEAD_DIMS, (False, True), (False, True)
):
    q, k, long = (torch.zeros(1, seqlen, 4, head_dim, dtype=dtype) for seqlen in (5, 300, 3000))
    for keys in (k, k[:, :299], k[:, :, :1], long):
        attention(q, keys, keys, causal=causal, return_lse=return_lse)
    if begin:
        print(f"first call: {time.perf_counter() - begin:.2f} s")
        begin = 0
print(f"flashladder of {Path(flashladder.__file__).parents[1]}")
print(f"{driver.loads} kernels, {len(driver.launches)} launches")
random = Random(1)
for call in usual_calls.CALLS * 100:
    call(random)
print(f"all calls: {driver.loads} modules, {len(driver.launches)} launched")
try:
    attention(q, k, k, version="23")
except ToolchainError as error:
    print(f"refused without a compiler: {error}")
