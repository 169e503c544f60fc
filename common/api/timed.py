"""Any rung, in any configuration, as a function of torch tensors; and how long its kernels take."""

from __future__ import annotations

from typing import Any

import torch

from flashladder.common.api import attention, validate
from flashladder.common.errors import DeviceError
from flashladder.common.runtime import ready
from flashladder.common.runtime.gpu import CYCLES_PER_US

HOLD_US = 300  # within which the host has queued the events and the launch


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, version: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp of a rung: `attention(q, k, v, return_lse=True, ...)`, which has the other options.

    `version` is a rung by its number or name, and after an @ fields of its configuration: "02", "02@block_m=128".
    """
    o, lse = attention(q, k, v, version=version, return_lse=True, **options)
    return o, lse


def forward_timed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, version: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The same as `forward`, and the milliseconds of its kernels between two events of the current stream.

    One run goes before, and the stream is held until the host has queued everything. That is one sample of a warm
    kernel; `flashladder bench` measures. DeviceError for tensors on the CPU: the emulator has no time to tell.
    """
    q, version = validate.tensor("q", q), validate.text("version", version)
    if not ready.is_gpu(q.device):
        rung = version.partition("@")[0]
        raise DeviceError(f"q is on {q.device}: a kernel is timed on a GPU. `flashladder run {rung}` predicts its time")
    forward(q, k, v, version=version, **options)
    with torch.cuda.device(q.device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HOLD_US * CYCLES_PER_US)
        begin.record()
        o, lse = forward(q, k, v, version=version, **options)
        end.record()
        end.synchronize()
        return o, lse, begin.elapsed_time(end)
