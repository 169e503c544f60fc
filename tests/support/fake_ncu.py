"""A stand-in for ncu's pages of a launch: what the emulator counted, as if a GPU had counted it."""

import csv
import json
from collections import Counter
from dataclasses import asdict

from flashladder.common.compiler.sass import read
from flashladder.common.predict.agreement import sass_opcode
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.runtime.execute import on_emulator

COLUMNS = (
    *("Address", "Source", "# Samples", "Instructions Executed", "L1 Wavefronts Shared", "L1 Wavefronts Shared Ideal"),
    *("L2 Theoretical Sectors Global", "L2 Theoretical Sectors Global Ideal"),
    *("stall_wait", "stall_math", "stall_wait (Not Issued)"),
)
METRICS = {
    "device__attribute_display_name": "NVIDIA H100 80GB HBM3",
    "gpu__time_duration.sum": "12,345.6",
    "sm__cycles_active.avg": "20,000",
    "sm__cycles_elapsed.avg": "25,000",
    "dram__bytes_read.sum": "200,000",
    "dram__bytes_write.sum": "65536",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": "1.25",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed": "2",
    "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed": "3",
    "l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed": "1.5",
}


def write_pages(folder, artifact, problem, extra_wavefronts=0):
    """The pages of a launch, each count at the first instruction of its opcode."""
    folder.mkdir(parents=True)
    job = {"version": artifact.version, "config": artifact.config.name, "arch": artifact.arch}
    (folder / "job.json").write_text(json.dumps({**job, "problem": asdict(problem)}))
    _write(
        folder / "raw.csv",
        [["ID", "Kernel Name", *METRICS], ["", "", *[""] * len(METRICS)]],
        [["0", "it", *METRICS.values()]],
    )
    counts = _counts(artifact, problem)
    counts["shared"]["LDSM"] += extra_wavefronts
    rows = [_row(instruction, counts) for instruction in read(artifact).instructions]
    _write(folder / "source.csv", [["Kernel Name", "attention_forward", ""], COLUMNS], rows)


def _counts(artifact, problem):
    report = on_emulator(artifact, problem, make_inputs(problem), race=False)
    counts = {name: Counter() for name in ("executed", "shared", "shared ideal", "global", "global ideal")}
    for opcode, times in report.instructions.items():
        counts["executed"][sass_opcode(opcode)] += times
    for space, lines in (("shared", report.shared), ("global", report.global_memory)):
        for line in lines:
            counts[space][sass_opcode(line.opcode)] += line.units
            counts[f"{space} ideal"][sass_opcode(line.opcode)] += line.ideal
    return counts


def _row(instruction, counts):
    def take(name):
        return 0 if instruction.is_filler else counts[name].pop(instruction.base, 0)

    figures = (take(name) for name in ("executed", "shared", "shared ideal", "global", "global ideal"))
    samples = 30 if instruction.base == "HMMA" else 3
    return [hex(0x7F0000000000 + instruction.address), instruction.text, samples, *figures, samples - 1, 1, 0]


def _write(path, head, rows):
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([*head, *rows])
