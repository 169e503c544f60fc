"""The GPU's own counters for one launch, through NVIDIA Nsight Compute (ncu).

Read from its CSV pages, not by its Python module ncu_report: pages are kept, and read where there is no ncu.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flashladder.common.compiler.sass.opcodes import FILLER, kind_of
from flashladder.common.errors import DeviceError, ToolchainError
from flashladder.common.paths import AS_NAMES

RAW, SOURCE = "raw.csv", "source.csv"
_PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
_STALL = "stall_"
_DEVICE = "device__attribute_display_name"
_NO_PERMISSION = "ERR_NVGPUCTRPERM"


@dataclass(frozen=True)
class Counted:
    """What ncu counted of one machine instruction, over all warps."""

    text: str
    executed: int
    shared_wavefronts: int
    shared_wavefronts_ideal: int
    global_sectors: int
    global_sectors_ideal: int
    samples: int  # how often a warp was found at this instruction
    stalls: dict[str, int]  # and why it waited there, by reason

    @property
    def opcode(self) -> str:
        words = self.text.split()
        return words[1] if words[0].startswith("@") else words[0]

    @property
    def kind(self) -> str:
        """As sass.opcodes.histogram counts it."""
        return FILLER if self.text.startswith("@!PT") else kind_of(self.opcode)


@dataclass(frozen=True)
class Profile:
    """The counters of one launch: of every instruction, and of the whole kernel by the metric's name."""

    instructions: tuple[Counted, ...]
    metrics: dict[str, float]
    device: str  # the GPU's name

    @cached_property
    def samples(self) -> int:
        return sum(instruction.samples for instruction in self.instructions)

    def total(self, field: str, *bases: str) -> int:
        """The sum of a field of Counted over all instructions, or over those that can execute of these opcodes, which
        may have modifiers: SYNCS.ARRIVE."""
        begins = tuple(f"{base}." for base in bases)
        chosen = [i for i in self.instructions if not bases or (f"{i.opcode}.".startswith(begins) and i.kind != FILLER)]
        return sum(getattr(instruction, field) for instruction in chosen)

    def stalls(self) -> dict[str, int]:
        """The samples of each reason to wait, the most frequent first; `selected` is none."""
        found: dict[str, int] = {}
        for instruction in self.instructions:
            for reason, samples in instruction.stalls.items():
                found[reason] = found.get(reason, 0) + samples
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def find_ncu() -> Path:
    """The profiler: on $PATH, in /usr/local/cuda or in /opt/nvidia. Raises ToolchainError."""
    if found := shutil.which("ncu"):
        return Path(found)
    places = [Path(folder) for folder in (os.path.join(os.environ.get("CUDA_HOME", _PLACES[0]), "bin"), *_PLACES)]
    for place in places:
        for candidate in (place / "ncu", *sorted(place.glob("*/ncu"), reverse=True)):
            if os.access(candidate, os.X_OK):
                return candidate
    raise ToolchainError(
        f"no ncu on PATH, in {' or in '.join(_PLACES)}: Nsight Compute comes with the CUDA toolkit, or as the package "
        "nsight-compute of NVIDIA's repository. Without it, `flashladder sass` predicts and "
        "`flashladder run --device emulator` counts"
    )


def profile(command: Sequence[str], folder: Path, entry: str) -> Profile:
    """Runs a command that launches our kernel `entry`, and profiles its first launch with all of ncu's sections.

    The pages raw.csv and source.csv are left in the folder. Raises ToolchainError without ncu and DeviceError where the
    command or the profiler fails.
    """
    ncu = str(find_ncu())
    report = folder / "report.ncu-rep"
    clocks = ["--clock-control", "none"]  # a shared GPU's clocks are not ours to set
    options = ["--set", "full", *clocks, "--kernel-name", entry, "--launch-count", "1", "--target-processes", "all"]
    folder.mkdir(parents=True, exist_ok=True)
    _run([ncu, *options, "--force-overwrite", "--export", str(report), *command])
    for page, name in (("raw", RAW), ("source", SOURCE)):
        units = ["--print-units", "base"] if page == "raw" else []
        (folder / name).write_text(
            _run([ncu, "--import", str(report), "--csv", "--page", page, *units]), errors=AS_NAMES
        )
    report.unlink()
    return load(folder)


def load(folder: Path) -> Profile:
    """The profile whose pages are in a folder."""
    values = parse_raw((folder / RAW).read_text(errors=AS_NAMES))
    numbers = {name: number for name, text in values.items() if (number := _parsed(text)) is not None}
    return Profile(tuple(parse_source((folder / SOURCE).read_text(errors=AS_NAMES))), numbers, values.get(_DEVICE, ""))


def parse_source(text: str) -> list[Counted]:
    """The instructions of `ncu --page source --csv`. ToolchainError where columns are missing."""
    lines = text[text.find('"Address"') :] if '"Address"' in text else ""
    rows = csv.DictReader(io.StringIO(lines))
    try:
        return [_counted(row) for row in rows if row["Address"]]
    except (KeyError, ValueError) as error:
        raise ToolchainError(
            f"ncu's source page has not the column or figure {error}; ncu 2023.1 or later would do"
        ) from None


def parse_raw(text: str) -> dict[str, str]:
    """The metrics of `ncu --page raw --csv --print-units base`: names, units and values are rows."""
    rows = list(csv.reader(io.StringIO(text[max(text.find('"ID"'), 0) :])))
    if len(rows) < 3:
        raise ToolchainError("ncu's raw page holds no launch: names, units and values make three lines or more")
    return dict(zip(rows[0], rows[2], strict=False))


def _parsed(text: str) -> float | None:
    """A metric's number; None where it is a word."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _counted(row: dict[str, str]) -> Counted:
    stalls = {
        name.removeprefix(_STALL): _number(value)
        for name, value in row.items()
        if name and name.startswith(_STALL) and "(" not in name
    }
    return Counted(
        text=row["Source"].strip(),
        executed=_number(row["Instructions Executed"]),
        shared_wavefronts=_number(row["L1 Wavefronts Shared"]),
        shared_wavefronts_ideal=_number(row["L1 Wavefronts Shared Ideal"]),
        global_sectors=_number(row["L2 Theoretical Sectors Global"]),
        global_sectors_ideal=_number(row["L2 Theoretical Sectors Global Ideal"]),
        samples=_number(row["# Samples"]),
        stalls={reason: samples for reason, samples in stalls.items() if samples},
    )


def _number(text: str) -> int:
    return int(float(text.replace(",", ""))) if text and text != "-" else 0


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, errors=AS_NAMES)
    said = "\n".join(part for part in (result.stdout.strip(), result.stderr.strip()) if part)
    if _NO_PERMISSION in said:
        raise DeviceError(
            f"the driver keeps the GPU's counters from this user ({_NO_PERMISSION}): run as root, or let an "
            "administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if result.returncode or "No kernels were profiled" in said:
        raise DeviceError(f"ncu failed: `{' '.join(command[:1])} ... {command[-1]}` said\n{said[-2000:]}")
    return result.stdout
