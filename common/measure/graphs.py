"""Launches in a CUDA graph: one call of the host, and the GPU goes from one to the next by itself.

So engines run decode, whose kernels take less time than the host needs to launch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from flashladder.common.errors import DeviceError, first_line

REPLAY_US = 5  # a graph of one launch takes so much longer than the launch, at most
WARM_UP = 3  # of each launch, on the stream that is captured: what a library makes at its first is in no graph


class CaptureError(DeviceError):
    """A launch does what no CUDA graph holds; to be read after the contender's name."""


class Captured:
    """Launches in a graph: a call replays them all, and gives what the last one gave. CaptureError."""

    def __init__(self, launches: Sequence[Callable[[], object]]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._launches = launches  # which hold tensors that replays read
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in WARM_UP * list(dict.fromkeys(launches)):
                launch()
            torch.cuda.synchronize()
            self._graph.capture_begin(pool=pool)
            try:
                for launch in launches:
                    self._given = launch()
                self._graph.capture_end()
            except BaseException as error:  # a foreign package may fail in any way, and Ctrl-C may come
                self._abandon(pool)
                if not isinstance(error, Exception):
                    raise
                raise CaptureError(f"cannot be captured in a CUDA graph: {first_line(error)}") from None
        self._poison()

    def __call__(self) -> object:
        self._graph.replay()
        return self._given

    def _abandon(self, pool: tuple[int, int]) -> None:
        """A capture that failed must be ended, or the next one would fail too."""
        with suppress(RuntimeError):
            self._graph.capture_end()
        with suppress(RuntimeError):  # which torch up to 2.11 leaves out after an error: pytorch/pytorch#180395
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)

    def _poison(self) -> None:
        """What was computed amid the capture, since another stream was not captured, must not pass for a replay's."""
        for tensor in self._given if isinstance(self._given, tuple) else ():
            if tensor is not None:
                tensor.fill_(torch.nan)


def require_all(launches: int, each_us: float, alone_us: float) -> None:
    """CaptureError where launches in a graph take less than half of what one takes in a graph of its own."""
    if 2 * each_us < alone_us - REPLAY_US:
        raise CaptureError(
            f"takes {each_us:.2f} us in a CUDA graph of {launches} launches and {alone_us:.2f} us alone: "
            "its graph does not hold all of them"
        )
