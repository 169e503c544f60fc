"""Machine code as tables for the console."""

from __future__ import annotations

import linecache
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from flashladder.common.catalog import Version
from flashladder.common.compiler.sass import diff
from flashladder.common.compiler.sass.code import Code
from flashladder.common.compiler.sass.diff import RungPair
from flashladder.common.compiler.sass.instruction import Position, SassInstruction
from flashladder.common.compiler.sass.occupancy import Occupancy, occupancy
from flashladder.common.compiler.sass.opcodes import kinds, pipe_of
from flashladder.common.compiler.sass.pipes import source_text
from flashladder.common.problem.config import GpuDescription, KernelConfig, spell
from flashladder.common.report.tables import facts, folding, numbers, table

PIPE_STYLES = {"tensor": "green", "mufu": "magenta", "fma": "blue", "alu": "cyan", "lsu": "yellow"}
TEXT_WIDTH = 64  # of an instruction in a listing
PIPE_MEANINGS = {
    "tensor": "mma.sync",
    "wgmma": "wgmma",
    "mufu": "exponentials",
    "fma": "FP32, and integer multiplication",
    "imad": "integer multiplication alone",
    "alu": "integers, logic, comparisons, conversions",
    "lsu": "load/store data path, shuffles, wgmma's operands",
    "shared": "banks of L1 and shared memory, of all but TMA",
    "issue": "issue slots",
}


def summary(version: Version, code: Code, gpu: GpuDescription) -> Table:
    """Resources, occupancy and the main loop in a few lines."""
    artifact, loop = code.artifact, code.loop
    return facts(
        f"{version.name}: {version.title}",
        {
            "configuration": artifact.config.name.replace(",", ", "),
            "compiled for": f"{artifact.arch} ({gpu.title})",
            "registers": f"{artifact.registers}, at most {code.loop_live} live at once in the main loop",
            "spills": _spills(code),
            "shared memory": f"{artifact.launch.shared_bytes / 1024:g} KiB a CTA",
            "occupancy": _occupancy(occupancy(artifact, gpu)),
            "kernel": f"{len(code.instructions):,} instructions",
            "main loop": f"{len(loop):,} instructions, {_extent(loop)}; {_blocks(code)}",
            "one warp alone": f"{code.loop_issue_cycles:,} cycles to issue the main loop, never waiting for memory",
        },
    )


def opcodes(code: Code, *, loop_only: bool = False) -> Table:
    """How often each kind of opcode is in the loop and in the kernel, and the cycles that the compiler put after it."""
    made = table("Opcodes", ["kind", "pipe", *numbers("loop", "share", "stall cycles", "kernel")])
    stalls: Counter[str] = Counter()
    for kind, instruction in zip(kinds(code.loop), code.loop, strict=True):
        stalls[kind] += max(1, instruction.control.stall)
    for kind in sorted(code.counts, key=lambda kind: (-code.loop_counts[kind], -code.counts[kind], kind)):
        in_loop = code.loop_counts[kind]
        if in_loop or not loop_only:
            loop, stall, kernel = _figures(in_loop, stalls[kind], code.counts[kind])
            share = f"{in_loop / len(code.loop):.1%}" if in_loop else ""
            pipe = pipe_of(kind) or ""
            made.add_row(kind, Text(pipe, PIPE_STYLES.get(pipe, "")), loop, share, stall, kernel)
    return made


def bounds(code: Code, gpu: GpuDescription) -> Table:
    """The least cycles of every pipe for one CTA's pass through the main loop."""
    title = f"One CTA's pass through the main loop needs at least, of an SM of {gpu.name}"
    found = code.loop_bounds(gpu)
    sources = "; ".join(f"{mark}: {source_text(mark)}" for mark in sorted({bound.source for bound in found}))
    columns = ["pipe", "what", *numbers("work", "cycles", "of the longest"), "rate from"]
    made = table(title, columns, caption=sources)
    longest = found[0].cycles if found else 1.0
    for bound in found:
        style = "bold" if bound.cycles == longest else ""
        figures = f"{bound.work:,.0f}", f"{bound.cycles:,.0f}", f"{bound.cycles / longest:.0%}"
        made.add_row(bound.pipe, PIPE_MEANINGS[bound.pipe], *figures, bound.source, style=style)
    return made


def limit(code: Code, gpu: GpuDescription) -> str:
    """What the bounds come to, as a sentence."""
    found = code.loop_bounds(gpu)
    if not found or not code.loop_blocks:
        return "The main loop has no tensor-core work to bound."
    resident = occupancy(code.artifact, gpu).ctas
    alone = code.loop_issue_cycles / resident
    cycles, what = max((found[0].cycles, f"the {found[0].pipe} pipe"), (alone, "the schedule of each warp"))
    tflops = code.block_flops * code.loop_blocks / cycles * gpu.num_sms * gpu.boost_mhz / 1e6
    return (
        f"With {resident} CTAs an SM, {what} allows a block of K and V every {cycles / code.loop_blocks:,.0f} cycles: "
        f"at most {tflops:,.0f} TFLOP/s at {gpu.boost_mhz} MHz. The schedule of each warp alone would allow one every "
        f"{alone / code.loop_blocks:,.0f}."
    )


def lines(code: Code) -> Table:
    """The main loop by line of the kernel: what each line became, with all that is inlined there."""
    kinds = ("HMMA", "LDSM", "MUFU", "LDGSTS")
    counts: dict[Position, Counter[str]] = defaultdict(Counter)
    for instruction in code.loop:
        if instruction.source:
            counts[instruction.source[-1]][instruction.base] += 1
    columns = ["line", *numbers("instructions", *kinds), *folding("source")]
    made = table("The main loop by source line", columns)
    for place, found in sorted(counts.items()):
        figures = _figures(found.total(), *(found[kind] for kind in kinds))
        made.add_row(str(place), *figures, Text(linecache.getline(place.file, place.line).strip()))
    return made


def listing(instructions: Iterable[SassInstruction], code: Code) -> Text:
    """Instructions with their control words, live registers and source lines."""
    text = Text(no_wrap=True)
    text.append(f"{'addr':>5}  {'control':23} live  {'instruction':{TEXT_WIDTH}}  source\n", "bold")
    for instruction in instructions:
        live = str(code.live.get(instruction.address, ""))
        text.append(f"{instruction.address:5x}  {instruction.control}  {live:>4}  ")
        text.append(_styled(instruction, width=TEXT_WIDTH))
        text.append(f"  {_places(instruction)}\n", "dim")
    return text


def compared(pair: RungPair) -> Table:
    """Which two kernels are compared, and how their configurations differ."""
    left, right = pair.left.artifact.config, pair.right.artifact.config
    fields = dict.fromkeys((*left.fields, *right.fields))
    differing = [name for name in fields if left.as_dict().get(name) != right.as_dict().get(name)]
    changes = (f"{name}: {_value(left, name)} -> {_value(right, name)}" for name in differing)
    return facts(
        f"{pair.lower.name} and {pair.upper.name}, for {pair.right.artifact.arch}",
        {
            pair.lower.name: pair.lower.idea,
            pair.upper.name: pair.upper.idea,
            "both with": ", ".join(f"{name}={spell(value)}" for name, value in right.items if name not in differing),
            "but": ", ".join(changes) or "no difference",
        },
    )


def source(lower: Version, upper: Version) -> Syntax | Text:
    """The difference of the two kernel.cu."""
    text = diff.source_diff(lower, upper)
    if not text:
        return Text(f"Both are {lower.kernel.parent.name}/{lower.kernel.name}; only the configuration differs.")
    return Syntax(text, "diff", theme="ansi_dark", background_color="default", word_wrap=True)


def resources(left: Code, right: Code) -> Table:
    """Resources and lengths, before and after."""
    after = right.figures()
    rows = ((name, *_comparison(before, after[name])) for name, before in left.figures().items())
    return table("Resources", ["", *numbers("before", "after", "change")], rows)


def count_changes(title: str, before: Counter[str], after: Counter[str]) -> Table:
    """The kinds of opcodes whose counts differ."""
    rows = ((kind, *_comparison(left, right)) for kind, left, right in diff.changed(before, after))
    made = table(title, ["kind", *numbers("before", "after", "change")], rows)
    made.add_row("all", *_comparison(before.total(), after.total()), style="bold")
    return made


def side_by_side(
    title: str, left: Sequence[SassInstruction], right: Sequence[SassInstruction], context: int = 2
) -> Table:
    """Two listings: - and + mark what one side alone has, | what differs; long equal stretches are left out."""
    made = table(title, [*folding("before"), "", *folding("after")])
    aligned = list(diff.align(left, right))
    shown = _near_changes(aligned, context)
    skipped = 0
    for number, pair in enumerate(aligned):
        if number not in shown:
            skipped += 1
            continue
        if skipped:
            made.add_row(Text(f"... {skipped} equal", "dim"), "", "")
            skipped = 0
        made.add_row(*_row(pair))
    if skipped:
        made.add_row(Text(f"... {skipped} equal", "dim"), "", "")
    return made


def _near_changes(aligned: Sequence[diff.InstructionPair], context: int) -> set[int]:
    changes = [number for number, pair in enumerate(aligned) if not pair.is_same]
    return {near for number in changes for near in range(number - context, number + context + 1)}


def _row(pair: diff.InstructionPair) -> tuple[Text, Text, Text]:
    if pair.is_same:
        return _styled(pair.left, "dim"), Text(""), _styled(pair.right, "dim")
    mark = "-" if pair.right is None else "+" if pair.left is None else "|"
    return _styled(pair.left, "red"), Text(mark, "green" if mark == "+" else "red"), _styled(pair.right, "green")


def _styled(instruction: SassInstruction | None, style: str | None = None, width: int = 0) -> Text:
    if instruction is None:
        return Text("")
    chosen = PIPE_STYLES.get(pipe_of(instruction.opcode) or "", "") if style is None else style
    return Text(f"{instruction.text:{width}}", "dim" if instruction.is_filler else chosen)


def _places(instruction: SassInstruction) -> str:
    """The innermost and the outermost source line."""
    return " < ".join(str(place) for place in dict.fromkeys((*instruction.source[:1], *instruction.source[-1:])))


def _comparison(before: int, after: int) -> tuple[str, str, Text]:
    change = after - before
    return f"{before:,}", f"{after:,}", Text(f"{change:+,}" if change else "", "green" if change < 0 else "red")


def _figures(*values: int) -> list[str]:
    return [f"{value:,}" if value else "" for value in values]


def _value(config: KernelConfig, name: str) -> str:
    return spell(config.as_dict()[name]) if name in config.fields else "none"


def _spills(code: Code) -> str:
    artifact = code.artifact
    if not artifact.local_bytes:
        return "none"
    spilled = f"{artifact.spill_store_bytes} bytes stored, {artifact.spill_load_bytes} loaded"
    return f"{spilled}; {code.spill_instructions} of the instructions are in the main loop"


def _occupancy(found: Occupancy) -> str:
    allowed = ", ".join(f"{resource} {limit}" for resource, limit in found.limits.items())
    by = " and ".join(found.limited_by)
    return f"{found.ctas} CTAs ({found.warps} warps) an SM, limited by {by} (allowed: {allowed})"


def _extent(loop: Sequence[SassInstruction]) -> str:
    return f"0x{loop[0].address:x} to 0x{loop[-1].address:x}" if loop else "none"


def _blocks(code: Code) -> str:
    if not code.loop_blocks:
        return "no tensor cores"
    blocks = "1 block" if code.loop_blocks == 1 else f"{code.loop_blocks:g} blocks"
    return f"{code.loop_warps:g} warps do {blocks} of K and V in one pass"


def rows(code: Code) -> Iterable[dict[str, str | int]]:
    """The opcode counts as rows of a CSV file."""
    artifact = code.artifact
    for kind, number in sorted(code.counts.items()):
        yield {
            "version": artifact.version,
            "config": artifact.config.name,
            "arch": artifact.arch,
            "kind": kind,
            "pipe": pipe_of(kind) or "",
            "loop": code.loop_counts[kind],
            "kernel": number,
        }
