"""Gradients: whether somebody wants them, and refusing those that no kernel here computes."""

from __future__ import annotations

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from flashladder.common.errors import UnsupportedProblemError


def wanted(*tensors: torch.Tensor) -> bool:
    """Whether torch is to differentiate what is computed of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def are_batched(*tensors: torch.Tensor | None) -> bool:
    """Whether one has no memory, as it stands for several: in torch.autograd.grad(..., is_grads_batched=True)."""
    return any(tensor is not None and _functorch.is_legacy_batchedtensor(tensor) for tensor in tensors)


def needed(*tensors: torch.Tensor | None) -> bool:
    """`wanted`, of tensors of which some may be left out; UnsupportedProblemError for a derivative of forward mode."""
    there = [tensor for tensor in tensors if tensor is not None]
    refuse_forward_mode(*there)
    return wanted(*there)


def refuse(*tensors: torch.Tensor, what: str = "the inputs", whose: str = "kernels compute") -> None:
    """UnsupportedProblemError where a tensor wants a gradient, or has a derivative with it (forward mode)."""
    if wanted(*tensors):
        raise UnsupportedProblemError(f"{what} want a gradient, and {whose} none: call it in torch.no_grad()")
    refuse_forward_mode(*tensors, what=what, whose=whose)


def refuse_forward_mode(*tensors: torch.Tensor, what: str = "the inputs", whose: str = "kernels compute") -> None:
    """UnsupportedProblemError where a tensor has a derivative with it."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UnsupportedProblemError(f"{what} have derivatives of forward mode, and {whose} none")


def refuse_transforms() -> None:
    """UnsupportedProblemError within torch.func's grad and its like, which torch has for no operator of a library."""
    if _are_within(_functorch.TransformType.Grad):
        raise UnsupportedProblemError(
            "torch.func wants a gradient (grad, vjp, jacrev), and kernels here have those of torch.autograd alone: "
            "torch.autograd.grad gives them"
        )


def refuse_vmap(what: str) -> None:
    """UnsupportedProblemError within torch.vmap, which has no rule for what takes a list of tensors."""
    if _are_within(_functorch.TransformType.Vmap):
        raise UnsupportedProblemError(f"torch.vmap does not batch {what}: call it once, with the whole batch")


def _are_within(kind: _functorch.TransformType) -> bool:
    """Whether torch.func transforms what runs; not while torch compiles."""
    if torch.compiler.is_compiling():
        return False
    return any(each.key() == kind for each in _functorch.get_interpreter_stack() or ())
