"""Ring attention tried: processes of this machine, a GPU each or the emulator, against the exact answer and one GPU."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from flashladder.common import catalog
from flashladder.common.api import attention
from flashladder.common.api.ring import pass_on, ring_attention, zigzag_split
from flashladder.common.errors import DeviceError, UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import target

WARM_UPS, ROUNDS = 3, 10


@dataclass(frozen=True)
class RingTrial:
    """What came of it: the largest errors of all ranks, and on GPUs the times of the slowest rank in milliseconds."""

    errors: dict[str, float]  # of o and lse; where it trains, of dq, dk and dv too
    tolerances: dict[str, float]
    times: dict[str, float]  # "one GPU": all keys and queries; "ring"; "exchange": of keys and values, without a kernel

    @property
    def passed(self) -> bool:
        """No error is above its tolerance."""
        return all(error <= self.tolerances[name] for name, error in self.errors.items())


def hold(problem: Problem, ranks: int, device: str, version: str, trains: bool = False) -> RingTrial:
    """Cuts the problem's sequence over so many processes; device: cuda (over NCCL) or cpu (over gloo, emulated).

    If it `trains`, each has gradients too.

    Raises UnsupportedProblemError for a problem that is not cut evenly or that no rung takes, DeviceError for too few
    GPUs or a process that failed.
    """
    if problem.seqlen_q != problem.seqlen_k:
        raise UnsupportedProblemError(
            f"seqlen_q={problem.seqlen_q}, seqlen_k={problem.seqlen_k}: a sequence that is cut has one length"
        )
    zigzag_split(torch.empty(1, problem.seqlen_q, device="meta"), 0, ranks)  # refuses what is not cut evenly
    if device == "cuda" and (there := torch.cuda.device_count()) < ranks:
        raise DeviceError(f"{ranks} GPUs are wanted, and torch finds {there}; the emulator needs none")
    card = target.resolve("gpu" if device == "cuda" else "emulator", None).card
    catalog.choice(problem, card, version)  # refuses what no rung takes
    with tempfile.TemporaryDirectory(prefix="flashladder-ring-") as folder:
        arguments = (ranks, device, problem, version, trains, folder)
        try:
            torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)
        except ProcessException as error:
            raise DeviceError(f"a process of the ring failed: {str(error).strip().splitlines()[-1]}") from error
        return RingTrial(**json.loads(Path(folder, "trial.json").read_text()))


def _rank(rank: int, ranks: int, device: str, problem: Problem, version: str, trains: bool, folder: str) -> None:
    """What each process does; the first writes down what came of it."""
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/door", rank=rank, world_size=ranks)
    try:
        tensors = make_inputs(problem, place)
        expected = expect(problem, tensors)
        q, k, v = (zigzag_split(tensor, rank, ranks) for tensor in (tensors.q, tensors.k, tensors.v))
        options: dict[str, Any] = {"causal": problem.causal, "softmax_scale": problem.softmax_scale, "version": version}
        ring = partial(ring_attention, q, k, v, **options)
        o, lse = ring(return_lse=True)
        errors = {
            "o": (o - zigzag_split(expected.exact["o"], rank, ranks)).abs().max(),
            "lse": (lse - zigzag_split(expected.exact["lse"], rank, ranks, dim=2)).abs().max(),
        }
        tolerances = dict(expected.tolerances)
        if trains:
            of_gradients, more = _errors_of_gradients(problem, options, rank, ranks, place)
            errors |= of_gradients
            tolerances |= more
        times = {}
        if device == "cuda":
            here = torch.stack((k, v))
            exchange = partial(_go_round, here, torch.empty_like(here), rank, ranks)
            alone = partial(attention, tensors.q, tensors.k, tensors.v, **options)
            for name, call in (("one GPU", alone), ("ring", ring), ("exchange", exchange)):
                times[name] = _time_ms(call)
        worst = _of_all({**errors, **times}, place)
        if rank == 0:
            trial = {
                "errors": {name: worst[name] for name in errors},
                "tolerances": tolerances,
                "times": {name: worst[name] for name in times},
            }
            Path(folder, "trial.json").write_text(json.dumps(trial))
        dist.barrier()  # gloo may end a process whose peer leaves while they still talk
    finally:
        dist.destroy_process_group()


def _errors_of_gradients(
    problem: Problem, options: dict[str, Any], rank: int, ranks: int, place: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Of this rank's dq, dk and dv, beside those of the whole sequence; and the tolerances."""
    whole = replace(problem, operation="backward")
    tensors = make_inputs(whole, place)
    expected = expect(whole, tensors)
    q, k, v = (zigzag_split(tensors.by_name[name], rank, ranks).requires_grad_() for name in "qkv")
    dout = zigzag_split(tensors.by_name["dout"], rank, ranks)
    found = torch.autograd.grad(ring_attention(q, k, v, **options), (q, k, v), dout)
    pairs = zip(("dq", "dk", "dv"), found, strict=True)
    exact = {name: zigzag_split(expected.exact[name], rank, ranks) for name in expected.exact}
    return {name: (gradient - exact[name]).abs().max() for name, gradient in pairs}, expected.tolerances


def _go_round(here: torch.Tensor, coming: torch.Tensor, rank: int, ranks: int) -> None:
    """The exchange of a whole call, with nothing to hide it."""
    for _ in range(ranks - 1):
        for transfer in pass_on(here, coming, None, rank, ranks):
            transfer.wait()


def _time_ms(call: Callable[[], object]) -> float:
    """The median of some rounds, which all ranks begin together."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for _ in range(WARM_UPS + ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return median(taken[WARM_UPS:])


def _of_all(values: dict[str, float | torch.Tensor], place: torch.device) -> dict[str, float]:
    """The largest of each over the ranks; of what is no number, infinity: NCCL's maximum passes NaNs over."""
    largest = torch.tensor([float(value) for value in values.values()], device=place).nan_to_num(nan=math.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(values, largest.tolist(), strict=True))
