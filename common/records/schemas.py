"""The columns of the lab's logs: what each row says, and of which kind each figure is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashladder.common.errors import ConfigError
from flashladder.common.problem.config import parse_values
from flashladder.common.records.log import PositiveFloat, Schema, Share
from flashladder.common.records.slowdowns import SLOWDOWN_SHARES

if TYPE_CHECKING:
    from flashladder.common.measure.statistics import Times


class ConfigText(str):
    """A configuration's name; empty for what has none. ValueError where its fields cannot be read."""

    def __new__(cls, text: str) -> ConfigText:
        try:
            parse_values(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return super().__new__(cls, text)


class LadderKind(str):
    """What a row of the ladder is of: a rung in its own or in the fixed configuration, or one of the field beside it.

    ValueError for another.
    """

    def __new__(cls, text: str) -> LadderKind:
        if text not in ("own", "fixed", "field"):
            raise ValueError(f"{text!r} is none of own, fixed and field")
        return super().__new__(cls, text)


class RoundTimes(str):
    """The time of each round in microseconds, in order, between spaces; empty where they were not kept.

    ValueError where one is no time.
    """

    def __new__(cls, text: str) -> RoundTimes:
        for word in text.split():
            PositiveFloat(word)
        return super().__new__(cls, text)

    @classmethod
    def of(cls, times: Times) -> RoundTimes:
        """Spells the times of `Measurement.times`, to a hundred-thousandth."""
        return cls(" ".join(f"{time:.5g}" for time in times))


_PLACE = {
    "time": str,  # UTC
    "commit": str,  # of this repository, with + where files differed from it
    "torch": str,
    "toolkit": str,  # CUDA release of the compiler; of a reference, what compiled it
    "driver": str,
    "device": str,  # the GPU's name, or emulator; of a reference also the CPU's name
    "gpu_id": str,  # a hash of the GPU's UUID
    "power_limit_w": float,
}
_KERNEL = {"version": str, "config": ConfigText, "arch": str, "code": str}  # code: Artifact.code, or a reference's key
PROBLEM = {
    "batch": int,
    "num_heads": int,
    "num_heads_k": int,
    "seqlen_q": int,
    "seqlen_k": int,
    "head_dim": int,
    "dtype": str,
    "causal": bool,
    "softmax_scale": float,
    "seed": int,
    "layout": str,
    "family": str,  # of inputs; empty in older rows, which are normal
    "lse": bool,  # whether it is asked for; empty in older rows, which all did
    "window_left": int,  # these three are empty in older rows, which have no bounds
    "window_right": int,  # empty for all keys
    "softcap": float,  # 0 for none
    "operation": str,  # these three are empty in older rows, which are of the first ladder's
    "head_dim_v": int,  # empty where it is head_dim
    "options": str,  # the operation's own that are not at their defaults: page_size=64
}
CHECK = {"passed": bool, "max_error": float, "tolerance": float, "lse_error": float, "lse_tolerance": float}
RESOURCES = {
    "registers": int,
    "spill_store_bytes": int,
    "spill_load_bytes": int,
    "shared_bytes": int,
    "compile_seconds": float,
}
_TIMES = {
    "mode": str,
    "rounds": int,
    "time_us": PositiveFloat,
    "tflops": PositiveFloat,
    "sm_mhz": float,
    "baseline": str,
    "baseline_version": str,
    "baseline_us": PositiveFloat,
    "ratio": PositiveFloat,  # baseline's time / ours
    "ratio_low": PositiveFloat,
    "ratio_high": PositiveFloat,
    "control_low": float,  # the baseline against itself
    "control_high": float,
    "verdict": str,
    "notes": str,
    "samples": int,  # of all contenders, of which the shares are
    **dict.fromkeys(SLOWDOWN_SHARES, Share),
}
_COUNTERS = {
    "emulated_seconds": float,
    "instructions": int,
    "mma_flops": int,
    "shared_wavefronts": int,
    "shared_wavefronts_ideal": int,
    "global_requests": int,
    "global_sectors": int,
    "global_bytes_read": int,
    "global_bytes_written": int,
}

RUNS = Schema({**_PLACE, **_KERNEL, **PROBLEM, **CHECK, **RESOURCES, **_TIMES, **_COUNTERS})
BENCH = Schema({"run": str, **_PLACE, **_KERNEL, **PROBLEM, **CHECK, **RESOURCES, **_TIMES})
# Chosen_by, of an own configuration: tuner, or default as in all rows without it. Round_us: those of one run and
# problem are of the same rounds, so that any two of them can be paired.
LADDER = Schema({"kind": LadderKind, **BENCH.columns, "chosen_by": str, "round_us": RoundTimes})
EXPERIMENT = Schema({"run": str, "label": str, **RUNS.columns, "memory_bytes": int})  # memory: beyond Q, K and V
# A row has errors, as studies/accuracy/deviation.py says, with the bars they are held against; or times; or tiles.
ACCURACY = Schema(
    {
        "run": str,
        **_PLACE,
        **_KERNEL,
        **PROBLEM,
        "yardstick": str,  # whose errors the bars come from
        "verdict": str,  # yardstick, met or missed
        "missed": str,  # which bars
        "mean_error": float,
        "mean_stderr": float,
        "rms_error": float,
        "max_error": float,
        "max_ulps": float,
        "lse_error": float,
        "mean_bar": float,
        "rms_bar": float,
        "max_ulps_bar": float,
        "lse_bar": float,
        "time_us": PositiveFloat,
        "normal_us": PositiveFloat,  # on normal inputs, in the same rounds
        "time_ratio": PositiveFloat,  # normal_us / time_us
        "time_ratio_low": PositiveFloat,
        "time_ratio_high": PositiveFloat,
        "computed_twice": float,  # tiles that were computed again / those on normal inputs, by the emulator's count
    }
)
# Packed sequences beside official kernels, and beside padding. Tflops are of the work without padding.
PACKED = Schema(
    {
        "run": str,
        **_PLACE,
        "contender": str,
        **_KERNEL,
        "mix": str,
        "tokens": int,
        **dict.fromkeys(("batch", "shortest", "longest"), int),  # how many sequences, and how long
        **{name: PROBLEM[name] for name in ("num_heads", "num_heads_k", "head_dim", "dtype", "causal", "seed")},
        **CHECK,
        **RESOURCES,
        **_TIMES,
    }
)
SAMPLES = Schema(
    {
        "run": str,
        "problem": str,
        "contender": str,
        "mode": str,
        "round": int,
        "launches": int,
        "time_us": PositiveFloat,
        "sm_mhz": int,
        "power_w": float,
        "temperature_c": int,
        "slowdowns": str,
    }
)
