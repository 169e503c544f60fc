"""Who follows q from a call to the launch goes through few modules, and comes back to few."""

import sys

import pytest
import torch

from flashladder.common import emulator
from flashladder.common.api import attention
from flashladder.common.api.kvcache import flash_attn_with_kvcache

Q, K = torch.randn(1, 40, 2, 64).bfloat16(), torch.randn(1, 80, 2, 64).bfloat16()
LENGTHS = torch.tensor([70], dtype=torch.int32)
CALLS = {
    "attention": lambda: attention(Q, K, K),
    "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(Q[:, :1], K, K, cache_seqlens=LENGTHS),
}
MOST_STAYS, MOST_RETURNS = 25, 8


class Launched(BaseException):
    """Nothing is computed."""


def is_q(value, depth=3):
    """Whether it is q, a view of it or a copy, or a container or an object of ours that has one."""
    if isinstance(value, torch.Tensor):
        is_alike = value.dtype == Q.dtype and value.shape in (Q.shape, Q[:, :1].shape)
        return is_alike and torch.equal(value, Q[:, : value.shape[1]])
    if type(value).__module__.startswith("flashladder.") and hasattr(value, "__dict__"):
        value = vars(value)
    inside = value.values() if isinstance(value, dict) else value
    return depth > 0 and isinstance(value, (dict, tuple, list)) and any(is_q(each, depth - 1) for each in list(inside))


def stays(call, monkeypatch):
    """The modules whose functions hold q, in the order in which they are entered or come back to, until the launch."""
    found = []

    def launched(*_, **__):
        sys.setprofile(None)
        raise Launched

    def look(frame, event, _):
        frame = frame if event == "call" else frame.f_back
        if (
            event in ("call", "return")
            and frame
            and (name := frame.f_globals.get("__name__", "")).startswith("flashladder.")
        ):
            sys.setprofile(None)
            if found[-1:] != [name] and any(is_q(value) for value in list(frame.f_locals.values())):
                found.append(name)
            sys.setprofile(look)

    monkeypatch.setattr(emulator, "compile_ptx", launched)
    sys.setprofile(look)
    with pytest.raises(Launched):
        call()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_q_stays_in_few_modules(name, monkeypatch):
    monkeypatch.setenv("FLASHLADDER_FAST", "0")
    walk = stays(CALLS[name], monkeypatch)
    assert walk[-1] == "flashladder.common.runtime.execute"
    assert len(walk) <= MOST_STAYS, walk
    assert len(walk) - len(set(walk)) <= MOST_RETURNS, walk
