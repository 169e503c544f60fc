"""Whoever in torch looks on at a call: a dispatch mode, two tracers and the profiler."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from flashladder.common.api import attention


def require_an_operator(*inputs):
    """All of them see attention's operator. Gives what it computed for the mode and for the profiler."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        watched = attention(*inputs)
    assert "flashladder.attention.default" in seen
    traced = make_fx(lambda *qkv: attention(*qkv))(*inputs)
    assert "torch.ops.flashladder.attention.default" in traced.code
    recorded = torch.jit.trace(lambda *qkv: attention(*qkv), inputs, check_trace=False)
    assert "flashladder::attention" in str(recorded.graph)
    with torch.profiler.profile() as profile:
        profiled = attention(*inputs)
    assert "flashladder::attention" in {event.key for event in profile.key_averages()}
    return watched, profiled
