"""Memory that a rung's kernels are lent, for calls that come often."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashladder.common.runtime.gpu import LoadedKernel
from flashladder.common.runtime.launch import SizedWorkspace

RESERVE = 1024  # counters that are zero from the beginning: for so many streams and captured calls

Lend = Callable[[int, int], torch.Tensor | int]  # of a stream and of bytes: a tensor, or where memory lies that stays


def lender(kernel: LoadedKernel, workspace: SizedWorkspace, device: torch.device) -> Lend:
    """What gives a workspace to a run. The device is current, and waits for what this clears before a run begins."""
    if workspace.zeroed and not workspace.names:
        return ZeroedMemory(workspace.num_bytes({}), kernel, device)
    make = torch.zeros if workspace.zeroed else torch.empty
    return lambda stream, num_bytes: make(num_bytes, dtype=torch.uint8, device=device)


class ZeroedMemory:
    """Memory that kernels find zero and leave zero, so that the host need not clear it.

    Runs of one stream follow each other, and share it. A graph may run beside any stream: what is captured has its own.
    """

    def __init__(self, num_bytes: int, kernel: LoadedKernel, device: torch.device) -> None:
        begin = kernel.zeros(RESERVE * num_bytes)
        self._unused = list(range(begin, begin + RESERVE * num_bytes, num_bytes))
        self.of_stream: dict[int, int] = {}
        self._num_bytes, self._device = num_bytes, device

    def __call__(self, stream: int, _: object = None) -> torch.Tensor | int:
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and stream in self.of_stream:
            return self.of_stream[stream]
        try:
            address = self._unused.pop()
        except IndexError:
            return torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        return address if capturing else self.of_stream.setdefault(stream, address)
