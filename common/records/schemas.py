"""The columns of the lab's logs: what each row says, and of which kind each figure is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flashladder.common.records.cells import (
    Amount,
    Arch,
    ConfigText,
    Error,
    Name,
    Operation,
    Pairs,
    PositiveFloat,
    Release,
    RoundTimes,
    Share,
    Signed,
    Size,
    Time,
    Tolerance,
    Words,
    one_of,
)
from flashladder.common.records.log import Schema
from flashladder.common.records.slowdowns import SLOWDOWN_SHARES

if TYPE_CHECKING:
    from flashladder.common.measure.statistics import Times


def round_times(times: Times) -> str:
    """Spells the times of `Measurement.times` in microseconds, to a hundred-thousandth, for a cell of RoundTimes."""
    return " ".join(f"{time:.5g}" for time in times)


PLACE = {
    "time": Time,  # UTC
    "commit": Name,  # of this repository, with + where files differed from it
    "torch": Release,
    "toolkit": Words,  # CUDA release of the compiler; of a reference, what compiled it
    "driver": Release,
    "device": Words,  # the GPU's name, or emulator; of a reference also the CPU's name
    "gpu_id": Name,  # a hash of the GPU's UUID
    "power_limit_w": Amount,
}
KERNEL = {
    "version": Name,
    "config": ConfigText,
    "arch": Arch,
    "code": Name,  # Artifact.code, or a reference's key
}
_SIZES = ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "head_dim")
PROBLEM = {
    **dict.fromkeys(_SIZES, Size),
    "dtype": Name,
    "causal": bool,
    "softmax_scale": float,
    "seed": int,
    "layout": Name,
    "family": Name,  # of inputs; empty in older rows, which are normal
    "lse": bool,  # whether it is asked for; empty in older rows, which all did
    "window_left": int,  # these three are empty in older rows, which have no bounds
    "window_right": int,  # empty for all keys
    "softcap": Amount,  # 0 for none
    "operation": Operation,  # these three are empty in older rows, which are of the first ladder's
    "head_dim_v": Size,  # empty where it is head_dim
    "options": Pairs,  # the operation's own that are not at their defaults: page_size=64
}
CHECK = {
    "passed": bool,
    "max_error": Error,
    "tolerance": Tolerance,
    "lse_error": Error,
    "lse_tolerance": Tolerance,
}
RESOURCES = {
    "registers": int,
    "spill_store_bytes": int,
    "spill_load_bytes": int,
    "shared_bytes": int,
    "compile_seconds": Amount,
}
_TIMES = {
    "mode": Name,
    "rounds": Size,
    "time_us": PositiveFloat,
    "tflops": PositiveFloat,
    "sm_mhz": Amount,
    "baseline": Name,
    "baseline_version": Name,
    "baseline_us": PositiveFloat,
    "ratio": PositiveFloat,  # baseline's time / ours
    "ratio_low": PositiveFloat,
    "ratio_high": PositiveFloat,
    "control_low": PositiveFloat,  # the baseline against itself
    "control_high": PositiveFloat,
    "verdict": Words,
    "notes": Words,
    "samples": Size,  # of all contenders, of which the shares are
    **dict.fromkeys(SLOWDOWN_SHARES, Share),
}
_COUNTERS = {
    "emulated_seconds": Amount,
    "instructions": int,
    "mma_flops": int,
    "shared_wavefronts": int,
    "shared_wavefronts_ideal": int,
    "global_requests": int,
    "global_sectors": int,
    "global_bytes_read": int,
    "global_bytes_written": int,
}

_ALWAYS = ("time", "device", "version", *_SIZES, "dtype", "causal")
_TIMED = ("ratio", "ratio_low", "ratio_high", "time_us", "tflops", "baseline", "baseline_us", "rounds")
RUNS = Schema({**PLACE, **KERNEL, **PROBLEM, **CHECK, **RESOURCES, **_TIMES, **_COUNTERS}, _ALWAYS, _TIMED)
# Empty but in rows of cells (common/measure/cells.py). Mix: of lengths, of packed sequences. Release: a baseline's own.
_CELL = {"group": Words, "case": Words, "mix": Words, "release": Words}
_COMPARED = {"run": Name, **PLACE, **KERNEL, **PROBLEM, **CHECK, **RESOURCES, **_TIMES}
BENCH = Schema({**_COMPARED, **_CELL}, ("run", *_ALWAYS), _TIMED)
# Kind: of a rung in its own or in the fixed configuration, or of one of the field beside it. Chosen_by, of an own
# configuration: tuner, or default as in all rows without it. Round_us: the time of each round in microseconds, in
# order; those of one run and problem are of the same rounds, so that any two of them can be paired.
LADDER = Schema(
    {
        "kind": Annotated[Name, one_of("own", "fixed", "field")],
        **_COMPARED,
        "chosen_by": Annotated[Name, one_of("tuner", "default")],
        "round_us": RoundTimes,
    },
    ("kind", *BENCH.required),
    _TIMED,
)
EXPERIMENT = Schema(
    {"run": Name, "label": Words, **RUNS.columns, "memory_bytes": int},  # memory: beyond Q, K and V
    ("run", "label", *_ALWAYS),
    _TIMED,
)
# A row has errors, as studies/accuracy/deviation.py says, with the bars they are held against; or times; or tiles.
ACCURACY = Schema(
    {
        "run": Name,
        **PLACE,
        **KERNEL,
        **PROBLEM,
        "gradient": Name,  # whose errors they are: dq, dk or dv; of O there is none
        "yardstick": Name,  # whose errors the bars come from
        "verdict": Name,  # yardstick, met or missed
        "missed": Words,  # which bars
        "mean_error": Signed,
        "mean_stderr": Error,
        "rms_error": Error,
        "max_error": Error,
        "max_ulps": Error,
        "lse_error": Error,
        "mean_bar": Error,
        "rms_bar": Error,
        "max_ulps_bar": Error,
        "lse_bar": Error,
        "time_us": PositiveFloat,
        "normal_us": PositiveFloat,  # on normal inputs, in the same rounds
        "time_ratio": PositiveFloat,  # normal_us / time_us
        "time_ratio_low": PositiveFloat,
        "time_ratio_high": PositiveFloat,
        "computed_twice": Amount,  # tiles that were computed again / those on normal inputs, by the emulator's count
    }
)
# Packed sequences beside official kernels, and beside padding. Tflops are of the work without padding.
PACKED = Schema(
    {
        "run": Name,
        **PLACE,
        "contender": Name,
        **KERNEL,
        "mix": Words,
        "tokens": Size,
        **dict.fromkeys(("batch", "shortest", "longest"), Size),  # how many sequences, and how long
        **{name: PROBLEM[name] for name in ("num_heads", "num_heads_k", "head_dim", "dtype", "causal", "seed")},
        **CHECK,
        **RESOURCES,
        **_TIMES,
    }
)
SAMPLES = Schema(
    {
        "run": Name,
        "problem": Words,
        "contender": Name,
        "mode": Name,
        "round": int,
        "launches": int,
        "time_us": PositiveFloat,
        "sm_mhz": int,
        "power_w": Amount,
        "temperature_c": int,
        "slowdowns": str,
    }
)
