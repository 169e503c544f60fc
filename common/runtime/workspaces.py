"""Memory that a rung's kernels are lent, for calls that come often."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

import torch

from flashladder.common.runtime.gpu import LoadedKernel
from flashladder.common.runtime.launch import SizedWorkspace

RESERVE = 1024  # counters that are zero from the beginning: for so many streams and captured calls
RESERVE_BYTES = 2**20  # of them, where their size depends on the problem
MOST_KEPT = 2**24  # bytes of scratch memory; who needs more asks torch for it each time

Lend = Callable[[int, int], torch.Tensor | int]  # of a stream and of bytes: a tensor, or where memory lies that stays


def lender(kernel: LoadedKernel, workspace: SizedWorkspace, device: torch.device) -> Lend:
    """What gives a workspace to a run. The device is current, and waits for what this clears before a run begins."""
    if workspace.zeroed and workspace.names:
        return ZeroedOfAnySize(Zeros(RESERVE_BYTES, kernel, device))
    if workspace.zeroed:
        num_bytes = workspace.num_bytes({})
        return ZeroedMemory(num_bytes, Zeros(RESERVE * num_bytes, kernel, device))
    return Scratch(device)


class OfOneSize:
    """Lends memory of one size, which streams keep: runs of one stream follow each other, and share it.

    A graph may run beside any stream: what is captured has its own.
    """

    def __init__(self, num_bytes: int) -> None:
        self.of_stream: dict[int, torch.Tensor | int] = {}
        self._num_bytes = num_bytes

    def __call__(self, stream: int, _: object = None) -> torch.Tensor | int:
        raise NotImplementedError


class Scratch:
    """Memory that a run's kernels write to before they read it.

    It lends torch's own. What `of_size` gives is for runs whose kernels follow each other in their stream, with those
    of no other run between them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, torch.Tensor] = {}  # by stream: the largest
        self._by_size: dict[int, KeptScratch] = {}

    def of_size(self, num_bytes: int) -> KeptScratch:
        return self._by_size.setdefault(num_bytes, KeptScratch(num_bytes, self))

    def kept(self, stream: int, num_bytes: int) -> torch.Tensor:
        """A stream's own, for runs of any size. It grows in powers of 2: all that were kept are not twice as much."""
        if (found := self._kept.get(stream)) is None or found.numel() < num_bytes:
            found = self._kept[stream] = self._that_stays(1 << (num_bytes - 1).bit_length())
        return found

    def _that_stays(self, num_bytes: int) -> torch.Tensor:
        """Torch's of no pool, on the current stream. What a thread asks for may come out of the pool of a graph that
        torch.compile makes ready, where nothing may stay: another thread asks.
        """
        is_gpu = self._device.type == "cuda"
        here = torch.cuda.stream(torch.cuda.current_stream(self._device)) if is_gpu else nullcontext()
        answer: Future[torch.Tensor] = Future()

        def ask() -> None:
            try:
                with here:  # each thread has a current stream of its own
                    answer.set_result(self(0, num_bytes))
            except BaseException as error:  # the caller's, whatever it is
                answer.set_exception(error)

        try:
            threading.Thread(target=ask, name="flashladder: memory that stays", daemon=True).start()
        except RuntimeError:  # the interpreter ends, and starts no thread
            ask()
        return answer.result()

    def __call__(self, _: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class KeptScratch(OfOneSize):
    """The same of one size, from memory that is kept."""

    def __init__(self, num_bytes: int, scratch: Scratch) -> None:
        super().__init__(num_bytes)
        self._scratch = scratch

    def __call__(self, stream: int, _: object = None) -> torch.Tensor | int:
        if self._num_bytes > MOST_KEPT or torch.cuda.is_current_stream_capturing():
            return self._scratch(stream, self._num_bytes)
        return self.of_stream.setdefault(stream, self._scratch.kept(stream, self._num_bytes))


class Zeros:
    """Memory that was cleared, to be taken once."""

    def __init__(self, num_bytes: int, kernel: LoadedKernel, device: torch.device) -> None:
        self._begin, self._left = kernel.zeros(num_bytes), num_bytes
        self._device, self._taking = device, threading.Lock()

    def take(self, num_bytes: int) -> int | None:
        """Where so much of it lies; None where there is no more."""
        with self._taking:
            if num_bytes > self._left:
                return None
            self._left -= num_bytes
            return self._begin + self._left

    def clear(self, num_bytes: int) -> torch.Tensor:
        """As much of torch's, cleared by the current stream."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


class ZeroedMemory(OfOneSize):
    """Memory that kernels find zero and leave zero, so that the host need not clear it."""

    def __init__(self, num_bytes: int, zeros: Zeros) -> None:
        super().__init__(num_bytes)
        self._zeros = zeros

    def __call__(self, stream: int, _: object = None) -> torch.Tensor | int:
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and stream in self.of_stream:
            return self.of_stream[stream]
        address = self._zeros.take(self._num_bytes)
        if address is None:
            return self._zeros.clear(self._num_bytes)
        return address if capturing else self.of_stream.setdefault(stream, address)


class ZeroedOfAnySize:
    """The same, for problems of any sizes."""

    def __init__(self, zeros: Zeros) -> None:
        self._zeros = zeros
        self._by_size: dict[int, ZeroedMemory] = {}

    def of_size(self, num_bytes: int) -> ZeroedMemory:
        return self._by_size.setdefault(num_bytes, ZeroedMemory(num_bytes, self._zeros))

    def __call__(self, stream: int, num_bytes: int) -> torch.Tensor | int:
        return self.of_size(num_bytes)(stream)
