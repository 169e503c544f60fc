"""The ways of training in which a step of a small GPT is timed with our attention beside torch's own, as data.

A way is two attentions, the sizes, and what makes a model ready for its steps; step_costs.py runs it.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashladder.common.api import attention
from flashladder.common.api.frontends.fallback import FallbackWarning
from flashladder.common.api.frontends.torch_switch import NAME, register_with_torch
from flashladder.common.api.packed import packed_attention
from flashladder.common.studies.models import training
from flashladder.common.studies.models.gpt import Attend, Gpt, Sizes, causal_sdpa
from flashladder.common.studies.models.training import DTYPE, OURS, TORCHS

ON_GPU = Sizes(layers=4, heads=12, head_dim=64, batch=16, seqlen=1024)
EMULATED = Sizes(layers=1, heads=3, head_dim=64, batch=1, seqlen=64)
COMPILED = 12  # of the ways, from the first one on, are also run under torch.compile
DROPOUT = 0.1
STARTS = (0, 1024, 1500, 3000, 4096, 6000, 9000, 10000, 13000, 16384)  # of packed sequences, of 16,384 tokens


class Prepared(NamedTuple):
    """A model that is ready for its steps."""

    module: Any  # what is called: the model, or what is around it
    optimizer: Any
    backward: Callable[[Tensor], object] = Tensor.backward
    cast: Callable[[str], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    sizes: Sizes
    ours: Attend
    torchs: Attend
    prepare: Callable[[Gpt, str], Prepared]
    checkpoints: bool = False
    compiled: bool = False
    comparable: bool = True  # whether losses are the same
    within: Callable[[str], AbstractContextManager[object]] = nullcontext  # around all, for a device
    within_ours: Callable[[], AbstractContextManager[object]] = nullcontext  # around steps with our attention
    missing: str | None = None  # what it needs and is not here


def ways(device: str) -> dict[str, Way]:
    """All by name."""
    base = ON_GPU if device == "cuda" else EMULATED
    plain = training.functions()
    usual = Way(base, plain[OURS], plain[TORCHS], _autocast)
    dropping = replace(
        usual,
        ours=partial(attention, causal=True, dropout_p=DROPOUT),  # type: ignore[arg-type]
        torchs=partial(causal_sdpa, dropout_p=DROPOUT),
        comparable=False,
    )
    ours, torchs = _packed(base, device)
    found = {
        "autocast": usual,
        "bf16": replace(usual, prepare=_bf16),
        "checkpoints": replace(usual, checkpoints=True),
        "dropout": dropping,
        "dropout-checkpoints": replace(dropping, checkpoints=True),
        "deterministic": replace(usual, within=_deterministic),
        "groups": replace(usual, sizes=replace(base, heads_k=base.heads // 3)),
        "d80": replace(usual, sizes=replace(base, heads=base.heads * 10 // 12, head_dim=80)),
        "d96": replace(usual, sizes=replace(base, heads=base.heads * 8 // 12, head_dim=96)),
        "packed": replace(usual, ours=ours, torchs=torchs),
        "ddp": replace(usual, prepare=_ddp, within=_process_group),
        "fsdp2": replace(usual, prepare=_fsdp2, within=_process_group),
        "accelerate": replace(usual, prepare=_accelerate, missing=_missing("accelerate")),
        "lightning": replace(usual, prepare=_lightning, missing=_missing("lightning")),
        "switch": replace(
            usual, ours=causal_sdpa, within_ours=_switched, missing=None if device == "cuda" else "a GPU"
        ),
    }
    compiled = {f"{name}-compiled": replace(way, compiled=True) for name, way in [*found.items()][:COMPILED]}
    return found | compiled


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), training.LEARNING_RATE, fused=True)


def _autocast(model: Gpt, device: str) -> Prepared:
    return Prepared(model, _adamw(model), cast=training.autocast)


def _bf16(model: Gpt, device: str) -> Prepared:
    model.to(DTYPE)
    return Prepared(model, _adamw(model))


def _ddp(model: Gpt, device: str) -> Prepared:
    from torch.nn.parallel import DistributedDataParallel

    around = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if device == "cuda" else None)
    return Prepared(around, _adamw(around), cast=training.autocast)


def _fsdp2(model: Gpt, device: str) -> Prepared:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shard = partial(fully_shard, mesh=init_device_mesh(device, (1,)), mp_policy=MixedPrecisionPolicy(DTYPE))
    for module in (*model.blocks, model):
        shard(module)
    return Prepared(model, _adamw(model))


def _accelerate(model: Gpt, device: str) -> Prepared:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device == "cpu")
    around, optimizer = accelerator.prepare(model, _adamw(model))
    return Prepared(around, optimizer, accelerator.backward)


def _lightning(model: Gpt, device: str) -> Prepared:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1, precision="bf16-mixed")
    around, optimizer = fabric.setup(model, _adamw(model))
    return Prepared(around, optimizer, fabric.backward)


def _missing(package: str) -> str | None:
    return None if find_spec(package) else f"the package {package}"


def _packed(sizes: Sizes, device: str) -> tuple[Attend, Attend]:
    """Attention within nine sequences, ours and torch's FlashAttention-2; all rows of a batch are one."""
    total = sizes.batch * sizes.seqlen
    places = [start * total // STARTS[-1] for start in STARTS]
    starts = torch.tensor(places, dtype=torch.int32, device=device)
    longest = max(end - begin for begin, end in itertools.pairwise(places))
    of_both = starts, starts, longest, longest

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Any = packed_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *of_both, causal=True)
        return o.view(q.shape)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return torch.ops.aten._flash_attention_forward(*rows, *of_both, 0.0, True, False)[0].view(q.shape)

    return ours, torchs


@contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """All of torch, and both attentions with it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def _process_group(device: str) -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # gloo's thread frees the last step under Python's lock. Who frees the model waits for it, and has that lock.
        time.sleep(0 if device == "cuda" else 0.1)
        dist.destroy_process_group()


@contextmanager
def _switched() -> Iterator[None]:
    """torch's FlashAttention-2 is ours, or it is an error."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    register_with_torch()
    activate_flash_attention_impl(NAME)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            warnings.simplefilter("error", FallbackWarning)
            yield
    finally:
        restore_flash_attention_impl()
