"""What a call of attention() costs the host, beside torch's own attention and the official kernels.

python tools/overhead.py                    attention()'s own rung, and the oldest general one
python tools/overhead.py 24 --seqlen 1024 --heads 16

Microseconds of the host: the median over rounds, after some to warm up. In a round each call has its turn, a batch that
the GPU's queue holds, so that their order does not matter. The first call of a rung is timed alone; it includes what a
process does once. Rungs from 26 on fill in tensor maps at each call, and those from 34 on look up a counter: together
what they cost more than rung 24.

The first table is under torch.no_grad(). The second is without it: what it costs to see that no input wants a gradient,
and what torch's attention takes where they do. attention() refuses those, since no rung computes gradients; the exit
code is 2 where it does not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table

from flashladder.common import catalog
from flashladder.common.console import Parser, console, warn
from flashladder.common.errors import DeviceError, UnsupportedProblemError, VerificationError
from flashladder.common.report.tables import numbers, table
from flashladder.tools.commands import arguments as options

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem, Tensors

OTHERS = ("fa3", "fa4")
TORCH = "scaled_dot_product_attention"

Calls = dict[str, Callable[[], object]]


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument(
        "versions", nargs="*", metavar="VERSION", help="rungs (default: attention()'s own, and the oldest general one)"
    )
    options.add_problem(made)
    return made


def main(arguments: argparse.Namespace) -> int:
    import torch

    from flashladder.common.problem.problem import Tensors, make_inputs
    from flashladder.common.runtime import ahead, gpu, quick, target

    place = target.resolve("gpu", None)
    problem = options.problem(arguments, batch=1, num_heads=16, seqlen_q=128)
    usual = [ahead.fastest(problem, place.arch, place.gpu.name), catalog.find(ahead.GENERAL[-1])]
    rungs = [catalog.find(name) for name in arguments.versions] or list(dict.fromkeys(usual))
    tensors, first = make_inputs(problem, "cuda"), {}
    wanting = Tensors({name: tensor.detach().requires_grad_() for name, tensor in tensors.by_name.items()})
    with torch.no_grad():
        calls: Calls = {TORCH: _torch(problem, tensors), **_others(problem, tensors)}
        for rung in rungs:
            ours = _ours(problem, tensors, rung)
            calls |= ours
            first[rung.address] = _seconds(next(iter(ours.values())))
        quick.load()
        for rung in rungs:
            calls[f"{rung.address}, in Python"] = _in_python(calls[rung.address])
            calls[f"{rung.address}, a new length"] = _new_lengths(problem, tensors, rung)
        console.print(_shown(f"host, microseconds a call: {problem.name}", gpu.host_costs_us(calls)))
    plain = {name: calls[name] for name in (TORCH, *(rung.address for rung in rungs))}
    enabled = {**plain, f"{TORCH}, inputs want gradients": _torch(problem, wanting)}
    console.print(_shown("the same where gradients are enabled", gpu.host_costs_us(enabled)))
    console.print(f"inputs that want gradients: {_refusal(problem, wanting)}")
    console.print(f"calls go through {'C++' if quick.extension else f'Python: {quick.missing}'}")
    for name, seconds in first.items():
        console.print(f"first call of {name}: {seconds:.2f} s")
    return 0


def _shown(title: str, costs: Mapping[str, float]) -> Table:
    rows = ((name, f"{cost:.1f}", f"{cost / costs[TORCH]:.2f}") for name, cost in costs.items())
    return table(title, ["call", *numbers("us", "to torch's")], rows)


def _refusal(problem: Problem, wanting: Tensors) -> str:
    """What attention() says to inputs that want gradients."""
    from flashladder.common.api import attention

    try:
        attention(wanting.q, wanting.k, wanting.v, causal=problem.causal)
    except UnsupportedProblemError as error:
        return str(error)
    raise VerificationError("attention() took inputs that want gradients, and gave an output that has none")


def _torch(problem: Problem, tensors: Tensors) -> Callable[[], object]:
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (tensor.transpose(1, 2) for tensor in (tensors.q, tensors.k, tensors.v))
    grouped = problem.num_heads != problem.num_heads_k
    return partial(scaled_dot_product_attention, q, k, v, is_causal=problem.causal, enable_gqa=grouped)


def _others(problem: Problem, tensors: Tensors) -> Calls:
    """The official kernels that are here."""
    from flashladder.common.measure import baselines

    found: Calls = {}
    for name in OTHERS:
        try:
            found[baselines.find(name).title] = baselines.find(name).prepare(problem, tensors)
        except DeviceError as error:
            warn(str(error))
    return found


def _ours(problem: Problem, tensors: Tensors, rung: catalog.Version) -> Calls:
    """The ways to call a rung."""
    import torch

    from flashladder.common.api import attention

    inputs = tensors.q, tensors.k, tensors.v
    call = partial(attention, *inputs, causal=problem.causal, version=rung.name)
    operator = torch.ops.flashladder.attention.default
    return {
        f"{rung.address}": call,
        f"{rung.address}, out=": partial(call, out=torch.empty_like(tensors.q)),
        f"{rung.address}, return_lse=True": partial(call, return_lse=True),
        f"{rung.address}, as torch.compile calls it": partial(
            operator, *inputs, problem.causal, None, rung.name, False
        ),
    }


def _in_python(call: Callable[[], object]) -> Callable[[], object]:
    """The same call where there is no C++ compiler; that itself costs some 0.1 us."""
    from flashladder.common.runtime import quick

    def slowly() -> None:
        kept, quick.extension = quick.extension, None
        try:
            call()
        finally:
            quick.extension = kept

    return slowly


def _new_lengths(problem: Problem, tensors: Tensors, rung: catalog.Version) -> Callable[[], object]:
    """A call whose length no call had before, as each in generation."""
    from flashladder.common.api import attention
    from flashladder.common.runtime.gpu import CALLS

    room = tensors.k.new_zeros((problem.batch, problem.seqlen_k + CALLS, problem.num_heads_k, problem.head_dim))
    grown = iter([room[:, : problem.seqlen_k + more] for more in range(1, CALLS + 1)])

    def call() -> None:
        keys = next(grown)
        attention(tensors.q, keys, keys, causal=problem.causal, version=rung.name)

    return call


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
