"""Training steps on the stand-in driver, for tests of their way through C++."""

import itertools
import struct

import torch

from flashladder.common.api import attention, backward, validate
from flashladder.common.api.packed import packed_attention
from flashladder.common.runtime import fast_path, gpu
from flashladder.tests.support import fake_cuda


def for_training(monkeypatch, node):
    """The driver. Calls go through C++ from the first one on, and have gradients by node.cpp, or by Python's Function.
    CPU tensors are taken for ones on a GPU. Kernels of one name have numbers behind it.
    """
    made = fake_cuda.for_attention(monkeypatch)
    named = lambda _, name: (0, made.names.append(f"{name.decode()} {len(made.names)}") or len(made.names))  # noqa: E731
    monkeypatch.setattr(made, "cuLibraryGetKernel", named)
    monkeypatch.setattr(fast_path, "extension", fast_path.made())
    monkeypatch.setattr(fast_path, "node", fast_path.made_node() if node else None)
    return made


def wanting(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def qkv(batch=2, rows=64, heads=4, heads_k=4, head_dim=64, keys=64, **more):
    return [wanting(batch, n, of, head_dim, **more) for n, of in ((rows, heads), (keys, heads_k), (keys, heads_k))]


QKV = qkv()


def step(inputs=QKV, wanted=None, of_lse=False, **options):
    """O, the log-sum-exp and gradients."""
    o, lse = attention(*inputs, return_lse=True, **options)
    outputs, given = ((o, lse), (torch.zeros_like(o), torch.zeros_like(lse))) if of_lse else (o, torch.zeros_like(o))
    return o, lse, *torch.autograd.grad(outputs, inputs if wanted is None else wanted, given)


def packed_step(lengths, inputs=QKV[:1] * 3, **options):
    """The same of packed sequences, of the first ones of the batch."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=inputs[0].device)
    packed = (x[0] for x in inputs)
    o, lse = packed_attention(*packed, starts, starts, *[max(lengths)] * 2, causal=True, return_lse=True, **options)
    return o, lse, *torch.autograd.grad(o, inputs, torch.zeros_like(o))


def in_python(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(fast_path, "extension", None)
        return call()


def asked_of(monkeypatch):
    """How often it was asked what arguments are, and which problem they come to."""
    found = []
    for module, name in ((validate, "inputs"), (backward, "problem_of")):
        usual = getattr(module, name)
        noted = lambda *given, name=name, usual=usual, **more: found.append(name) or usual(*given, **more)  # noqa: E731
        monkeypatch.setattr(module, name, noted)
    return found


def launches_of(driver, run):
    """What was launched: kernels, shapes and arguments, but for where tensors lie."""
    run()
    for loaded in gpu._loaded.values():
        workspaces = [8] if loaded.artifact.workspaces else []
        for kernel in loaded.artifact.kernels:
            maps = [128 * len(kernel.launch.tensor_maps)] if kernel.launch.tensor_maps else []
            name = driver.names[loaded._kernels[kernel.entry] - 1]
            driver.parts[name] = kernel.launch.params_bytes, *workspaces, *maps
    driver.launches.clear()
    run()
    return [
        (each.function, each.shape, each.stream, each.attributes, *map(without_addresses, each.arguments[::2]))
        for each in driver.launches
    ]


def without_addresses(packed):
    return [word for (word,) in struct.iter_unpack("Q", packed) if not 2**40 < word < 2**48]
