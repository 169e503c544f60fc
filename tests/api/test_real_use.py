"""attention within what training puts around it: autocast, activation checkpointing, two processes."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import flashladder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ours(q, k, v):
    return flashladder.attention(q, k, v, causal=True)


def torchs(q, k, v):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


class Layer(torch.nn.Module):
    """Parameters in fp32, and attention in what autocast gives it."""

    def __init__(self, attend=ours, checkpointed=False):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 3 * 64)
        self.attend, self.checkpointed = attend, checkpointed

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            qkv = self.qkv(x).unflatten(-1, (3, 1, 64)).unbind(2)
            o = checkpoint(self.attend, *qkv, use_reentrant=False) if self.checkpointed else self.attend(*qkv)
        return o.float().square().mean()


def layer(device="cpu", **options):
    torch.manual_seed(0)
    return Layer(**options).to(device)


def drawn(device="cpu"):
    return torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1)).to(device)


def gradients(model, x):
    model(x).backward()
    return [parameter.grad for parameter in model.parameters()]


def require_near(given, expected):
    for ours, theirs in zip(given, expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() <= 0.03 * theirs.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_under_autocast_parameters_of_fp32_train(checkpointed, device):
    x = drawn(device)
    found = gradients(layer(device, checkpointed=checkpointed), x)
    require_near(found, gradients(layer(device, attend=torchs), x))


def test_fp16_trains_under_loss_scaling():
    """The gradients of a scaled loss are as many times as large, and not rounded away."""
    q, k, v = inputs = [x.half().unflatten(-1, (1, 64)).requires_grad_() for x in (drawn(), drawn() / 2, drawn() / 3)]
    small = torch.full(q.shape, 2.0**-20)
    scaled = torch.autograd.grad(ours(q, k, v), inputs, (small * 2**14).half())
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for given, expected in zip(scaled, torch.autograd.grad(torchs(*exact), exact, small.double()), strict=True):
        assert (given.double() / 2**14 - expected).abs().max() <= 0.01 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_train_as_one(device, tmp_path):
    """DistributedDataParallel: each has half of a batch, and both come to the gradients of the whole."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs 2 GPUs")
    torch.multiprocessing.spawn(_rank, (device, str(tmp_path)), nprocs=2)
    expected = gradients(layer(attend=torchs), drawn())
    first, second = (torch.load(tmp_path / f"{rank}.pt", map_location="cpu") for rank in range(2))
    assert all(map(torch.equal, first, second))
    require_near(first, expected)


def _rank(rank, device, folder):
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/door", rank=rank, world_size=2)
    try:
        model = DistributedDataParallel(layer(device), device_ids=[rank] if device == "cuda" else None)
        torch.save(gradients(model, drawn(device)[rank : rank + 1]), f"{folder}/{rank}.pt")
        dist.barrier()  # gloo may end a process whose peer leaves while they still talk
    finally:
        dist.destroy_process_group()
