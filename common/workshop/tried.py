"""What was tried on a rung: a row for each verdict in tried.csv beside it, its patch in tried/, a table of them.

A patch is what the rung changes against its parent: kernel.cu, version.yaml but for what every rung calls itself, and
the headers of its own. `scaffold.make` makes a rung of one again.
"""

from __future__ import annotations

import difflib
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from flashladder.common import catalog
from flashladder.common.catalog import Version, schema
from flashladder.common.compiler.sources import Sources
from flashladder.common.escape import Markdown
from flashladder.common.escape import markdown as escaped
from flashladder.common.paths import CUDA_HEADERS, ROOT, VERSIONS
from flashladder.common.problem.config import KernelConfig, spell
from flashladder.common.records import records
from flashladder.common.records.cells import ConfigText, PositiveFloat
from flashladder.common.records.log import Log, Schema
from flashladder.common.records.schemas import RUNS
from flashladder.common.report import formats
from flashladder.common.report.pages import documents
from flashladder.common.report.sections import Section
from flashladder.common.report.tables import markdown, numbers
from flashladder.common.workshop import scaffold, verdict
from flashladder.common.workshop.trial import Trial

if TYPE_CHECKING:
    from flashladder.common.records.records import Row

MOST_WORDS = 60  # characters of a change in the table
_FIGURES = {  # columns of the machine code, of the rung and of its parent
    "registers": "registers",
    "spill_bytes": verdict.SPILLS,
    "loop_instructions": verdict.LOOP,
    "loop_cycles": verdict.CYCLES,
}
SCHEMA = Schema(
    {
        "run": str,
        **{name: RUNS.columns[name] for name in ("time", "commit", "torch", "toolkit", "driver")},
        **{name: RUNS.columns[name] for name in ("device", "gpu_id", "power_limit_w")},
        "version": str,
        "parent": str,
        "change": str,  # lines that the patch adds and takes away, and the first of them; or values that differ
        "patch": str,  # its file
        "note": str,
        "problem": str,
        "config": ConfigText,
        "parent_config": ConfigText,
        "arch": str,
        "code": str,
        "parent_code": str,
        **{f"{who}{name}": int for name in _FIGURES for who in ("", "parent_")},
        "instructions": int,  # executed on the emulator
        "verdict": str,  # faster, slower, tied, unclear; same code; predicted
        "mode": str,
        "rounds": int,
        "time_us": PositiveFloat,
        "parent_us": PositiveFloat,
        "ratio": PositiveFloat,  # parent's time / ours
        "ratio_low": PositiveFloat,
        "ratio_high": PositiveFloat,
        "control_low": float,  # the parent against itself
        "control_high": float,
        "notes": str,
    }
)
COLUMNS = (
    *("date", "what changed", "against", "at"),
    *numbers("registers", "spills", "loop", "cycles", "ratio"),
    *("verdict", "patch"),
)


def log_of(version: Version) -> Log:
    """The log of a rung."""
    return Log(version.directory / "tried.csv", SCHEMA)


def record(trial: Trial, note: str = "", is_dropped: bool = False) -> Path:
    """Adds a trial to its rung's log, with its patch, and brings the rung's page up to date; gives the log's path.

    The log of an idea that is dropped is its parent's. ResultsError where that cannot be written.
    """
    version, run = trial.idea.parent if is_dropped else trial.idea.version, records.new_run()
    text = patch(trial.idea.version, trial.idea.parent)
    log = log_of(version)
    log.append([_row(trial, run, note, text, _keep(text, version.directory / "tried", run) if text else "")])
    for section in sections_of(version):
        section.write()
    return log.path


def _keep(text: str, folder: Path, run: str) -> str:
    """The file of a patch, as the page links it: one is enough, however often it was tried."""
    folder.mkdir(exist_ok=True)
    file = next((file for file in folder.glob("*.patch") if file.read_text() == text), folder / f"{run}.patch")
    file.write_text(text)
    return f"{folder.name}/{file.name}"


def sections() -> list[Section]:
    """The table on each rung's page where something was tried."""
    return [section for rung in catalog.select(catalog.ladders()) for section in sections_of(rung)]


def sections_of(version: Version) -> list[Section]:
    """The table on a rung's page, where something was tried."""
    section = Section(
        version.directory / documents.PAGE, documents.TRIED, lambda: _table(version), heading=documents.DROPPED
    )
    return [section] if log_of(version).path.exists() else []


def _table(version: Version) -> str:
    """What was tried, in Markdown, the latest first."""
    rows, _ = log_of(version).read()
    return markdown(COLUMNS, map(_cells, reversed([*rows.itertuples()])))


def patch(version: Version, parent: Version) -> str:
    """What makes the rung of its parent, as a unified diff; empty where nothing does.

    A header of its own is compared with the parent's of the same name. Work on a rung of the checkout that is not
    committed yet brings what it changed in headers of the checkout.
    """
    theirs, ours = (_headers(each) for each in (parent, version))
    own = [(theirs.get(name), path, name) for name, path in ours.items() if path != theirs.get(name)]
    shared = [path for path in ours.values() if path in theirs.values()]
    files = [(parent.kernel, version.kernel, version.kernel.name), *own]
    return "".join([*(_diff(*each) for each in files), _of_declaration(version, parent), _uncommitted(version, shared)])


def _headers(version: Version) -> dict[str, Path]:
    """The headers of a rung by the names by which they are included."""
    return {name: path for path, name in sorted(Sources().headers(version.kernel).items())}


def _diff(before: Path | None, after: Path, name: str, text: str | None = None) -> str:
    """How a file differs from another of this name, or a text in its place does."""
    old = _text(before) if before else ""
    new = _text(after) if text is None else text
    left, right = (f"{_root(path, name)}/{name}" if path else "/dev/null" for path in (before, after))
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), left, right)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _root(path: Path, name: str) -> str:
    """The folder in which a header of this name was found."""
    return path.parents[name.count("/")].name


def _of_declaration(version: Version, parent: Version) -> str:
    """How version.yaml differs, under the parent's title, idea and parent."""
    before, after = (each.directory / schema.FILE for each in (parent, version))
    theirs, ours = (scaffold.inherited(_text(path)) for path in (before, after))
    return (
        _diff(before, after, schema.FILE, _text(before).replace(theirs, ours))
        if theirs in _text(before)
        else _diff(before, after, schema.FILE)
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def _uncommitted(version: Version, headers: Iterable[Path]) -> str:
    """How headers of the checkout differ from the commit, where the rung does too, and is the checkout's."""
    edited = [str(path) for path in headers if any(map(path.is_relative_to, (CUDA_HEADERS, VERSIONS)))]
    own = (str(version.kernel), str(version.directory / schema.FILE))
    if version.home or not edited or not _git("status", "--porcelain", "--", *own):
        return ""
    return _git("diff", "HEAD", "--", *edited)


def _git(*arguments: str) -> str:
    """What git says of the checkout; nothing where it is none, or there is no git."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def _change(text: str, ours: KernelConfig, parents: KernelConfig) -> str:
    """'+2 -1: the first line that is new', of a patch; the declaration's lines are left out.

    Where there are no others: the values of the configuration that differ.
    """
    files = [part for part in text.split("--- ") if part and not part.splitlines()[0].endswith(schema.FILE)]
    lines = [line for part in files for line in part.splitlines()[2:]]
    plus, minus = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "+-")
    first = next(filter(None, [*plus, *minus]), "")
    if first:
        return f"+{len(plus)} -{len(minus)}: {first}"
    before = parents.as_dict()
    differing = {name: value for name, value in ours.as_dict().items() if value != before.get(name)}
    return ", ".join(f"{name}={spell(value)}" for name, value in differing.items()) or (
        schema.FILE if text else "nothing"
    )


def _row(trial: Trial, run: str, note: str, text: str, file: str) -> Row:
    idea, timing, built = trial.idea, trial.timing, trial.built
    before, after = trial.parent.figures(), trial.ours.figures()
    place = timing.place if timing else records.of_place(on_gpu=False)
    row: Row = {name: value for name, value in place.items() if name in SCHEMA.columns}
    row |= {
        "run": run,
        "version": idea.version.name,
        "parent": idea.parent.name,
        "change": _change(text, built.ours.config, built.parent.config),
        "patch": file,
        "note": note,
        "problem": idea.problem.name,
        "config": built.ours.config.name,
        "parent_config": built.parent.config.name,
        "arch": built.ours.arch,
        "code": built.ours.code,
        "parent_code": built.parent.code,
        "instructions": sum(trial.emulated.report.instructions.values()),
        "verdict": verdict.short(trial),
    }
    for column, name in _FIGURES.items():
        row |= {column: after[name], f"parent_{column}": before[name]}
    if timing:
        row |= {
            "mode": timing.mode,
            "rounds": timing.rounds,
            "time_us": timing.time_us,
            "parent_us": timing.parent_us,
            "ratio": timing.ratio.value,
            "ratio_low": timing.ratio.low,
            "ratio_high": timing.ratio.high,
            "control_low": timing.control.low,
            "control_high": timing.control.high,
            "notes": "; ".join(timing.notes),
        }
    return row


def _cells(row: Any) -> tuple[str, ...]:
    """A line of the table."""
    is_measured = row.verdict in verdict.ADVICE
    ratio = formats.with_interval(row.ratio, row.ratio_low, row.ratio_high) if is_measured else ""
    device = "" if not is_measured else f", {row.device}"
    change = row.note or _code(row.change)
    figures = (formats.change((getattr(row, f"parent_{name}"), getattr(row, name))) for name in _FIGURES)
    against = row.parent.rpartition("/")[2][:2]
    return row.time[:10], change, against, _at(row.problem), *figures, ratio, f"{row.verdict}{device}", _link(row.patch)


def _at(problem: str) -> str:
    """A problem's name, as short as tells it from others in a table."""
    values = dict(part.split("=") for part in problem.split(","))
    causal = " causal" if "causal" in values else ""
    dtype = "" if values["dtype"] == "bf16" else f" {values['dtype']}"
    return f"d{values['head_dim']}{causal}{dtype}, {int(values['seqlen_q']):,} rows"


def _code(change: str) -> Markdown:
    """A change in a cell, its line as code."""
    counts, _, line = change.partition(": ")
    short = line if len(line) <= MOST_WORDS else f"{line[:MOST_WORDS]}..."
    code = short.replace("`", "'").replace("|", "\\|")  # in code nothing else acts
    return Markdown(f"{escaped(counts)}: `{code}`") if line else escaped(counts)


def _link(file: str) -> Markdown:
    return Markdown(f"[patch]({quote(file)})" if file else "")
