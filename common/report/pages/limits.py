"""docs/limits.md: which rung a call launches, by option, head_dim and arch, as the catalogue chooses it."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from flashladder.common import catalog
from flashladder.common.api import padding
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.own import FIRST
from flashladder.common.paths import ROOT
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.head_dims import CACHED_HEAD_DIMS, HEAD_DIMS
from flashladder.common.problem.problem import Problem, operation_named
from flashladder.common.records.factors import Times, factor, measured
from flashladder.common.report.sections import Section
from flashladder.common.report.templating import render

PAGE, MARKER = ROOT / "docs" / "limits.md", "limits"
GPUS = ("h100", "a100")  # one of each arch
APART = (192, 128)
WIDTHS = (*((columns, columns) for columns in HEAD_DIMS), APART)  # of Q and K, and of V
BOUNDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 1024},
    "softcap": {"softcap": 30.0},
    "ALiBi": {"alibi": True},
}
OTHERS: dict[str, dict[str, Any]] = {"dropout": {"dropout_p": 0.1}, "packed": {"seqlens_q": (1024, 2048)}}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {  # and each one's fields of a problem, by the operation
    FIRST: {
        **BOUNDS,
        **OTHERS,
        "sinks": {"sinks": True},
        "log-sum-exp": {"lse": True},
        "any mask": {"mods": "mask=k<=q"},
    },
    "backward": {
        **{f"gradient, {name}": fields for name, fields in (BOUNDS | OTHERS).items()},
        "gradient, deterministic": {"options": {"deterministic": True}},
        "gradient, that of the log-sum-exp too": {"options": {"dlse": True}},
        "gradient, any mask": {"mods": "mask=k<=q"},
    },
    "decode": {
        **{f"decode, {name}": fields for name, fields in BOUNDS.items()},
        "decode, sinks": {"sinks": True},
        "decode, pages": {"options": {"paged": True}},
        "varlen over pages": {"seqlens_q": (1024, 1), "options": {"paged": True, "packed_q": True}},
        "varlen over pages in 8 bits": {
            "seqlens_q": (1024, 1),
            "options": {"paged": True, "packed_q": True, "fp8_cache": True},
        },
        "decode, padding": {"options": {"leftpad": True}},
        "decode, new keys": {"options": {"new_keys": True}},
        "decode, new keys and rotary": {"options": {"new_keys": True, "rotary": True}},
        "decode, draft tree": {"causal": True, "options": {"tree": True}},
        "decode, cache in 8 bits": {"options": {"fp8_cache": True}},
        "decode, cache in 8 bits, new keys, window": {
            "window_left": 1024,
            "options": {"fp8_cache": True, "new_keys": True},
        },
    },
}
LATENTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # columns of K and of V, and options of mla
    "576 columns of K and 512 of V": (576, 512, {}),
    "512 and 512": (512, 512, {}),
    "160 and 128": (160, 128, {}),
    "rows in 8 bits": (576, 512, {"fp8_rows": True}),
    "lists of keys": (576, 512, {"sparse": True}),
}


class Call(NamedTuple):
    """A call with an option."""

    operation: str
    fields: dict[str, Any]

    def columns(self, head_dim: int, head_dim_v: int, gpu: str) -> tuple[int, int]:
        """Those that a kernel is asked for: more than the tensors have where these are copied first."""
        if self.operation != "decode":
            has_mods, arch = "mods" in self.fields, load_gpu(gpu).arch
            trained = catalog.widths(self.operation, arch, mods=has_mods) if self.operation == "backward" else None
            return padding.columns(head_dim, head_dim_v, "dropout_p" in self.fields, trained)
        if head_dim != head_dim_v or "packed_q" in self.fields.get("options", ()):
            return head_dim, head_dim_v
        columns = next((each for each in CACHED_HEAD_DIMS if head_dim <= each), head_dim)
        return columns, columns

    def problem(self, head_dim: int, head_dim_v: int) -> Problem:
        """Of usual sizes."""
        is_forward = self.operation == FIRST
        name = "packed" if is_forward and "seqlens_q" in self.fields else self.operation
        sizes = {**operation_named(name).usual, "head_dim": head_dim, "head_dim_v": head_dim_v}
        return Problem(**{**sizes, "lse": not is_forward, **self.fields}, operation=name)


@cache
def rung_of(problem: Problem, gpu: str) -> catalog.Version:
    """The one that calls launch. UnsupportedProblemError where none takes the problem."""
    described = load_gpu(gpu)
    return catalog.choice(problem, catalog.Card(described.arch, described))[0]


def section(folder: Path) -> Section:
    """The tables on the page; factors are of a folder's logs."""
    return Section(PAGE, MARKER, partial(text, folder))


def text(folder: Path) -> str:
    """The tables, in Markdown."""
    times = measured(folder)
    return render("limits.md.j2", parts=[_part(gpu, times) for gpu in GPUS])


def _part(gpu: str, times: Times) -> dict[str, Any]:
    rows, reasons = [], dict[str, int]()
    for operation, options in OPTIONS.items():
        usual: dict[tuple[int, int], str] = {}  # the rungs of plain calls
        for name, fields in options.items():
            call, cells, factors = Call(operation, fields), [], []
            for widths in WIDTHS:
                problem = call.problem(*(columns := call.columns(*widths, gpu)))
                try:
                    rung = rung_of(problem, gpu)
                except UnsupportedProblemError as error:
                    reason = str(error).partition(";")[0]
                    cells.append(f"refused ({reasons.setdefault(reason, len(reasons) + 1)})")
                    continue
                instructions = rung.instruction_set.title()
                cells.append(f"{rung.address} {instructions}" + (f", {columns[0]}" if columns != widths else ""))
                plain = Call(operation, {}).problem(*widths)
                rungs = usual.setdefault(widths, rung.name), rung.name
                if columns == widths and (found := factor(plain, fields, rungs, times)):
                    factors.append(f"{found:.2f} ({_name(widths)})")
            rows.append([name, *cells, ", ".join(factors)])
    columns_of = ["", *map(_name, WIDTHS), "factor"]
    mla = {
        name: _launched(Call("mla", {"options": options}).problem(*columns), gpu)
        for name, (*columns, options) in LATENTS.items()
    }
    return {"gpu": load_gpu(gpu), "columns": columns_of, "rows": rows, "reasons": reasons, "mla": mla}


def _name(widths: tuple[int, int]) -> str:
    """Of Q's and V's columns: one number where they are as many."""
    return "/".join(map(str, dict.fromkeys(widths)))


def _launched(problem: Problem, gpu: str) -> str:
    """The rung and its instructions, in words."""
    try:
        rung = rung_of(problem, gpu)
    except UnsupportedProblemError:
        return "refused"
    return f"{rung.address} {rung.instruction_set.title()}"
