"""What a call of attention() costs the host, beside torch's own attention and the official kernels.

flashladder overhead                    attention()'s own rung, and the oldest general one
flashladder overhead 24 --seqlen 1024 --heads 16

Microseconds of the host: the median over rounds, after some to warm up. In a round each call has its turn, a batch that
the GPU's queue holds, so that their order does not matter. The first call of a rung is timed alone; it includes what a
process does once. Rungs from 26 on fill in tensor maps at each call, and those from 34 on look up a counter: together
what they cost more than rung 24.

The first table is under torch.no_grad(). The second is without it: what it costs to see that no input wants a gradient,
and what a call takes where they do, whose backward pass is another call. The third is of decode: one row of each
sequence against a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from rich.table import Table

from flashladder.common import catalog
from flashladder.common.console import Parser, console
from flashladder.common.own import FIRST
from flashladder.common.report.tables import numbers, table
from flashladder.tools.commands import arguments as options


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

    from flashladder.common.problem.inputs import Tensors, make_inputs
    from flashladder.common.runtime import fast_path, gpu, target
    from flashladder.common.studies import host_costs

    place = target.resolve("gpu", None)
    problem = options.problem(arguments, FIRST, batch=1, num_heads=16, seqlen_q=128)
    usual = [catalog.choice(problem, place.card)[0], catalog.launched(problem.operation, place.arch)[-1]]
    rungs = [catalog.find(name) for name in arguments.versions] or list(dict.fromkeys(usual))
    tensors = make_inputs(problem, "cuda")
    wanting = Tensors(
        {name: tensor.detach().requires_grad_() for name, tensor in tensors.by_name.items()}, tensors.problem
    )
    with torch.no_grad():
        calls, first = host_costs.calls_of(problem, tensors, rungs)
        console.print(_shown(f"host, microseconds a call: {problem.name}", gpu.host_costs_us(calls)))
        of_caches = gpu.host_costs_us(host_costs.of_caches(problem, tensors))
    plain = {name: calls[name] for name in (host_costs.TORCH, *first)}
    differentiable = {
        f"{host_costs.TORCH}, inputs want gradients": host_costs.by_torch(problem, wanting),
        "attention(), inputs want gradients": host_costs.differentiable(problem, wanting),
    }
    console.print(_shown("the same where gradients are enabled", gpu.host_costs_us({**plain, **differentiable})))
    console.print(_shown("one row of each sequence against a cache", of_caches))
    console.print(f"calls go through {'C++' if fast_path.extension else f'Python: {fast_path.missing}'}")
    for name, seconds in first.items():
        console.print(f"first call of {name}: {seconds:.2f} s")
    return 0


def _shown(title: str, costs: Mapping[str, float]) -> Table:
    """The first is torch's."""
    torchs = next(iter(costs.values()))
    rows = ((name, f"{cost:.1f}", f"{cost / torchs:.2f}") for name, cost in costs.items())
    return table(title, ["call", *numbers("us", "to torch's")], rows)
