"""What a rung changes against the one below, as tables for its evidence: code, counters, ratios.

Everything follows from the sources, the compiler and results/: it can be checked wherever the same compiler is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from flashladder.common import catalog
from flashladder.common.catalog import Version
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sass.code import Code, read
from flashladder.common.compiler.sass.diff import comparable_configs
from flashladder.common.compiler.sass.occupancy import occupancy
from flashladder.common.problem.config import GpuDescription, KernelConfig, load_gpu, spell
from flashladder.common.report import formats
from flashladder.common.report.pages import documents, steps
from flashladder.common.report.sections import Section, compiler
from flashladder.common.report.tables import markdown, numbers

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem

ARCHES = {"ampere": ("sm_80", "sm_90a"), "hopper": ("sm_90a",)}  # of the tables, by instruction set
LEAST_CHANGE = 4  # an opcode's count that changes by less is the compiler's mood
MOST_KINDS = {"loop": 12, "rest": 6}  # opcodes that a table lists, by where they are
PREDICTED = ("a100", "rtx3090", "rtx4090")  # for these, rungs with defaults of their own for small SMs are compared...
PIPES = ("tensor", "shared", "issue", "fma", "alu", "mufu")
PREDICTED_AGAINST, KEYS = "16", 64  # ... with this rung, by what so many keys take

Values = tuple[int, ...]  # before and after; of the lowest rung one value
TableRow = tuple[str, list[Values]]  # a name, and values for each column


def requests(version: Version) -> list[BuildRequest]:
    """The kernels that a rung's tables compare: for each arch the rung below, where there is one, and the rung."""
    lower = version.below()
    pairs: list[tuple[Version, KernelConfig]] = [(version, version.config())]
    if lower:
        pairs = list(zip((lower, version), comparable_configs(lower, version), strict=True))
    return [BuildRequest(*pair, arch) for arch in ARCHES[version.instruction_set] for pair in pairs]


def section(version: Version) -> Section:
    """The tables in a rung's evidence, which they begin where there is none."""
    begins = documents.evidence(version.number, version.title)
    return Section(version.directory / documents.EVIDENCE, documents.TABLES, lambda: text(version), begins)


def text(version: Version) -> str:
    """The tables of a rung, in Markdown. Raises what building, disassembling and emulating raise."""
    by_arch: dict[str, list[Code]] = {}
    for artifact in build(requests(version)):
        by_arch.setdefault(artifact.arch, []).append(read(artifact))
    columns = list(by_arch.values())
    artifacts = [code.artifact for code in columns[-1]]
    return "\n\n".join(
        [
            _subject(artifacts),
            _table("machine code", list(by_arch), [*_figures(columns), *_opcode_changes(columns)]),
            _table("counted by the emulator", [artifacts[-1].arch], _counters(artifacts)),
            *(steps.measured(version) or [steps.NOT_TIMED]),
            *_predicted(version),
            f"Made by `flashladder evidence` with ptxas {compiler()}; the emulator ran {_ran(artifacts[-1])}.",
        ]
    )


def _subject(artifacts: Sequence[Artifact]) -> str:
    """A sentence on what the tables compare."""
    upper = artifacts[-1].config
    if len(artifacts) == 1:
        return f"{artifacts[0].version} with `{upper.name}`."
    lower = artifacts[0].config
    shared = KernelConfig(tuple(item for item in upper.items if item in lower.items))
    names = [name for name in dict.fromkeys((*lower.fields, *upper.fields)) if name not in shared.fields]
    changes = [f"`{name}` {_spelled(lower, name)} → {_spelled(upper, name)}" for name in names]
    return f"{artifacts[0].version} → {artifacts[1].version}, both with `{shared.name}`{'; '.join(['', *changes])}."


def _spelled(config: KernelConfig, name: str) -> str:
    return spell(config.as_dict()[name]) if name in config.fields else "(none)"


def _figures(columns: Sequence[Sequence[Code]]) -> list[TableRow]:
    """Lengths and resources, without those that are 0 everywhere."""
    figures = [[code.figures() for code in codes] for codes in columns]
    rows = [_row(name, name, figures) for name in figures[0][0]]
    return [row for row in rows if any(map(any, row[1]))]


def _opcode_changes(columns: Sequence[Sequence[Code]]) -> list[TableRow]:
    """The opcodes whose counts change most, in the main loop and outside of it."""
    in_loop = [[code.loop_counts for code in codes] for codes in columns]
    outside = [[code.counts - code.loop_counts for code in codes] for codes in columns]
    return [
        *_greatest_changes("{} in the loop", in_loop)[: MOST_KINDS["loop"]],
        *_greatest_changes("{} outside the loop", outside)[: MOST_KINDS["rest"]],
    ]


def _greatest_changes(name: str, columns: Sequence[Sequence[Counter[str]]]) -> list[TableRow]:
    kinds = sorted({kind for counts in columns for count in counts for kind in count})
    rows = [_row(name.format(kind), kind, columns) for kind in kinds]
    return sorted((row for row in rows if _change(row) >= LEAST_CHANGE), key=_change, reverse=True)


def _change(row: TableRow) -> int:
    return max(abs(values[-1] - values[0]) for values in row[1])


def _row(name: str, key: str, columns: Sequence[Sequence[Mapping[str, int]]]) -> TableRow:
    return name, [tuple(figures.get(key, 0) for figures in of_arch) for of_arch in columns]


def _counters(artifacts: Sequence[Artifact]) -> list[TableRow]:
    """What the emulator counts of shared and global memory."""
    counted = [_count(artifact) for artifact in artifacts]
    names = dict.fromkeys(name for counts in reversed(counted) for name in counts)
    return [_row(name, name, [counted]) for name in names]


def _counted(artifact: Artifact) -> Problem:
    """The problem that the emulator runs."""
    from flashladder.common.problem.problem import Problem, operation_named

    return Problem.of_config(artifact.operation, artifact.config, **operation_named(artifact.operation).counted)


def _ran(artifact: Artifact) -> str:
    """Its sizes, in words."""
    problem = _counted(artifact)
    sequences = f", {problem.batch} sequences" if problem.batch > 1 else ""
    keys = f" and {problem.seqlen_k} keys" if problem.seqlen_k != problem.seqlen_q else ""
    return f"{problem.num_heads} heads of {problem.seqlen_q} row{'s' * (problem.seqlen_q > 1)}{keys}{sequences}"


def _count(artifact: Artifact) -> dict[str, int]:
    from flashladder.common.emulator import TMA, WGMMA
    from flashladder.common.problem.inputs import make_inputs
    from flashladder.common.runtime.execute import on_emulator

    problem = _counted(artifact)
    report = on_emulator(artifact, problem, make_inputs(problem), race=False)
    movers = {"of them for wgmma's operands": WGMMA, "of them by TMA": TMA}
    return {
        "wavefronts of shared memory": report.shared_wavefronts,
        **{name: wavefronts for name, mover in movers.items() if (wavefronts := report.wavefronts_of(mover))},
        "of them bank conflicts": report.shared_wavefronts - report.shared_wavefronts_ideal,
        "requests to global memory": report.global_requests,
        "sectors of global memory": report.global_sectors,
        "of them wasted": sum(max(0, line.units - line.ideal) for line in report.global_memory),
    }


def _predicted(version: Version) -> list[str]:
    """What the machine code says of GPUs that nothing was measured on, beside the last rung of the fixed ladder."""
    if version.small_sm is None:
        return []
    from flashladder.common.problem.problem import Problem

    gpus = [load_gpu(name) for name in PREDICTED]
    rungs = (catalog.find(PREDICTED_AGAINST, version.root), version)
    pairs = [(rung, gpu) for gpu in gpus for rung in rungs]
    built = build([BuildRequest(rung, rung.config_for(Problem(), gpu), gpu.arch) for rung, gpu in pairs])
    figures = [_for_gpu(read(artifact), gpu) for artifact, (_, gpu) in zip(built, pairs, strict=True)]
    columns = [figures[i : i + len(rungs)] for i in range(0, len(figures), len(rungs))]
    title = f"predicted from machine code, never measured: {rungs[0].name} → {version.name}"
    heads = [f"{gpu.title}, block_n={code.config.block_n}" for gpu, code in zip(gpus, built[1::2], strict=True)]
    return [_table(title, heads, [_row(name, name, columns) for name in figures[0]])]


def _for_gpu(code: Code, gpu: GpuDescription) -> dict[str, int]:
    """What `KEYS` keys take of a warp, and of an SM for one CTA, without what is seldom executed."""
    artifact = code.artifact
    share = KEYS / (artifact.launch.block_n * code.loop_blocks)  # of a pass through the loop
    cycles = {bound.pipe: round(bound.cycles * share) for bound in code.loop_bounds(gpu, usual=True)}
    return {
        "spill stores and loads, bytes": artifact.spill_store_bytes + artifact.spill_load_bytes,
        "warps an SM": occupancy(artifact, gpu).warps,
        f"instructions, {KEYS} keys": round(len(code.usual_loop) * share),
        **{f"cycles of the pipe {pipe}, {KEYS} keys": cycles[pipe] for pipe in PIPES},
    }


def _table(title: str, columns: Iterable[str], rows: Iterable[TableRow]) -> str:
    """A table in Markdown; a value that does not change stands once."""
    return markdown([title, *numbers(*columns)], ((name, *map(formats.change, values)) for name, values in rows))
