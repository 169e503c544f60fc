"""NaN in all memory that a call may be lent: torch.empty gives it, and so do workspaces that are kept."""

import ctypes

import torch

from flashladder.common.runtime import ready

BYTE = 0xFF  # a NaN of all such bytes in every floating point type, and -1 as a whole number
SIZES = [2**power for power in range(12, 29)]  # bytes: in all half a gigabyte
BETWEEN = (2**20 + 512, 2**17, 2**14, 512)  # of torch's pools for large and for small blocks, the last their unit
M_PERTURB, PERTURBED = -6, 0x100  # of mallopt(3), which fills new memory with the complement of the lower byte


def poison(device: torch.device | str) -> None:
    """From now on new memory holds NaN; on a GPU, that which the allocator of the current stream has already."""
    if torch.device(device).type == "cpu":
        ctypes.CDLL(None).mallopt(M_PERTURB, PERTURBED)
        return
    blocks = [_block(size, device) for size in SIZES]
    for size in BETWEEN:
        reserved = torch.cuda.memory_reserved(device)
        while torch.cuda.memory_reserved(device) == reserved:
            blocks.append(_block(size, device))
        blocks.pop()  # what it was cut from
        torch.cuda.empty_cache()
    del blocks  # which the allocator keeps
    for each in ready.by_kind.values():
        for lend in each.call._lenders if each.call else ():
            for kept in getattr(lend, "_kept", {}).values():
                kept.fill_(BYTE)


def _block(size: int, device: torch.device | str) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device).fill_(BYTE)


def is_poisoned(device: str) -> bool:
    """Whether new memory holds NaN."""
    new = [torch.empty(count, dtype=torch.bfloat16, device=device) for count in (5000, 60_000, 3_000_000)]
    return all(bool(tensor.isnan().all()) for tensor in new)  # which writes to further memory


def fill_with_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which holds NaN then."""
    return tensor.fill_(-1 if tensor.dtype == torch.int32 else torch.nan)
