"""Made-up logs for tests of what reads them. Nothing in here was measured."""

import gzip
import random

import numpy as np

from flashladder.common import catalog
from flashladder.common.records import run_files
from flashladder.common.records.log import Log
from flashladder.common.records.schemas import BENCH, LADDER, RUNS, round_times

FIELD = {"cudnn": 1.9, "fa3": 2.0, "triton": 1.3}
RATIOS = {"01": 0.16, "02": 0.76, "07": 0.91, "16": 1.06}  # of the rungs' own configurations
HALF_WIDTH = 0.002
OFFICIAL_TFLOPS = 300.0
LENGTHS = (512, 4096)
ROUNDS = 32


def round_us(time_us, shape, who, noise=2e-4):
    """Times of rounds: all that take part in a shape's rounds share a large drift, and each has a small noise."""
    drift = np.cumprod(1 + random.Random(str(shape)).gauss(0, 0.02) * np.ones(ROUNDS))
    rng = random.Random(f"{shape} {who}")
    return round_times(np.array([time_us * slow * rng.gauss(1, noise) for slow in drift]))


def field(name, seqlen, dtype="bf16", **changes):
    """A line of a ladder's log for a kernel beside it."""
    none = dict.fromkeys(("config", "code", "registers", "spill_store_bytes", "spill_load_bytes"))
    return row("16", "field", seqlen, dtype, FIELD[name], **none | {"version": name} | changes)


def row(number, kind, seqlen, dtype="bf16", ratio=None, **changes):
    """A line of a ladder's log."""
    version = catalog.find(number)
    ratio = ratio or RATIOS[number] * (1 if kind == "own" else 0.9)
    baseline_us = 4 * 16384 * 16 * 128 * seqlen / OFFICIAL_TFLOPS / 1e6
    line = {
        "kind": kind,
        "run": "made-up",
        "time": "2026-01-02T03:04:05+00:00",
        "torch": "2.11.0",
        "driver": "580.1",
        "toolkit": "13.0",
        "device": "NVIDIA H100 80GB HBM3",
        "gpu_id": "0a0a0a0a0a0a",
        "version": version.name,
        "config": version.config(dtype=dtype).name,
        "code": "0" * 24,
        "batch": 16384 // seqlen,
        "num_heads": 16,
        "num_heads_k": 16,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "head_dim": 128,
        "dtype": dtype,
        "causal": False,
        "passed": True,
        "registers": 232,
        "spill_store_bytes": 36 if number == "16" else 0,
        "spill_load_bytes": 36 if number == "16" else 0,
        "mode": "hot",
        "rounds": ROUNDS,
        "time_us": baseline_us / ratio,
        "tflops": OFFICIAL_TFLOPS * ratio,
        "baseline": "fa2",
        "baseline_version": "2.11.0",
        "baseline_us": baseline_us,
        "ratio": ratio,
        "ratio_low": ratio * (1 - HALF_WIDTH),
        "ratio_high": ratio * (1 + HALF_WIDTH),
        "verdict": "faster" if ratio > 1 else "slower",
        "notes": "",
        "samples": 1000,
        "power_cap_share": 0.9,
        "thermal_share": 0.0,
        "other_slowdown_share": 0.0,
        "round_us": round_us(baseline_us / ratio, (seqlen, dtype), (number, kind)),
    }
    return line | changes


def change(log, edit):
    """Changes the text of the files of a log whose runs have ended, as damage or another version would; the files."""
    for path in log.files:
        run_files.write(path, edit(gzip.decompress(path.read_bytes()).decode()).encode())
    return log.files


def ladder(folder, gpu="h100", dtypes=("bf16", "fp16"), beside=(), **changes):
    """Writes the log of a ladder of four rungs, and of what is beside it; gives the log."""
    log = Log(folder / f"ladder_{gpu}.csv", LADDER)
    kinds, shapes = ("own", "fixed"), [(s, dtype) for dtype in dtypes for s in LENGTHS]
    log.append([row(n, kind, *shape, **changes) for n in RATIOS for kind in kinds for shape in shapes])
    log.append([field(name, *shape, **changes) for name in beside for shape in shapes])
    return log


def runs(folder):
    """Writes a log of runs, on the emulator and on a GPU, and one of comparisons."""
    emulated = dict.fromkeys(("time_us", "tflops", "ratio", "baseline", "baseline_us", "verdict"))
    for name, schema in (("runs.csv", RUNS), ("bench.csv", BENCH)):
        lines = [row("16", "own", 512), row("02", "own", 512, device="emulator") | emulated]
        Log(folder / name, schema).append([{k: v for k, v in line.items() if k in schema.columns} for line in lines])


def study(folder):
    """Writes the log of a study of four trials, of which one failed and one won a final."""
    (folder / "tuning").mkdir()
    trials = [(64, 0.9, "measured"), (128, 1.05, "measured"), (64, "", "hung"), (128, 1.01, "measured")]
    lines = [
        f'{number},16_static_stride,"block_m={block},num_warps=4",{verdict},because,{ratio},'
        + ("1.04,true" if number == 1 else ",false")
        for number, (block, ratio, verdict) in enumerate(trials)
    ]
    header = "trial,version,config,verdict,reason,ratio,final_ratio,winner"
    (folder / "tuning" / "16_h100.csv").write_text("\n".join([header, *lines, ""]))


def opcodes(folder):
    """Writes the opcode counts of three rungs."""
    counts = {
        "01_base": {"HMMA": 128, "LDSM": 64, "FFMA": 32, "BAR": 3},
        "02_swizzling": {"HMMA": 256, "LDSM": 64, "FFMA": 64, "BAR": 3},
        "37_no_maxima": {"HGMMA": 16, "HMMA": 128, "FFMA": 320},
    }
    pipes = {"HMMA": "tensor", "HGMMA": "tensor", "LDSM": "lsu", "FFMA": "fma", "BAR": ""}
    lines = ["version,config,arch,kind,pipe,loop,kernel"]
    lines += [f"{v},c,sm_90a,{kind},{pipes[kind]},{n},{n}" for v, kinds in counts.items() for kind, n in kinds.items()]
    (folder / "sass_h100.csv").write_text("\n".join([*lines, ""]))
