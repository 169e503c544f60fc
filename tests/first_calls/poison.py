"""NaN in all memory that a call may be lent: torch.empty gives it, and so do workspaces that are kept."""

import ctypes

import torch

from flashladder.common.runtime import ready

BYTE = 0xFF  # a NaN of all such bytes in every floating point type, and -1 as a whole number
SIZES = [2**power for power in range(12, 29)]  # bytes: in all half a gigabyte
M_PERTURB, PERTURBED = -6, 0x100  # of mallopt(3), which fills new memory with the complement of the lower byte


def poison(device: torch.device | str) -> None:
    """From now on new memory holds NaN; on a GPU, all that the allocator has free."""
    if torch.device(device).type == "cpu":
        ctypes.CDLL(None).mallopt(M_PERTURB, PERTURBED)
        return
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in SIZES]
    del blocks  # which the allocator keeps
    torch.cuda.synchronize(device)
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                torch.as_tensor(Free(block["address"], block["size"]), device=device).fill_(BYTE)
    for each in ready.by_kind.values():
        for lend in each.call._lenders if each.call else ():
            for kept in getattr(lend, "_kept", {}).values():
                kept.fill_(BYTE)


class Free:
    """A block that the allocator has free, as bytes that torch reads without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        shape = {"shape": (num_bytes,), "typestr": "|u1", "strides": None}
        self.__cuda_array_interface__ = {**shape, "data": (address, False), "version": 2}


def is_poisoned(device: str) -> bool:
    """Whether new memory holds NaN."""
    new = [torch.empty(count, dtype=torch.bfloat16, device=device) for count in (5000, 60_000, 3_000_000)]
    return all(bool(tensor.isnan().all()) for tensor in new)  # which writes to further memory


def fill_with_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which holds NaN then."""
    return tensor.fill_(-1 if tensor.dtype == torch.int32 else torch.nan)
