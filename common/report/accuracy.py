"""What the log of accuracy says, as data frames and text: the latest figures, and the worst family of each kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from flashladder.common import catalog
from flashladder.common.measure import baselines
from flashladder.common.report.tables import folding, numbers, table
from flashladder.common.studies.accuracy.deviation import GRADIENTS, STANDARD_ERRORS
from flashladder.common.studies.accuracy.study import MISSED, YARDSTICK

COLUMNS = (
    *("type", *numbers("met"), "worst family"),
    *numbers("keys", "of its bar", "RMS", "mean", "LSE"),
    *("slowest family", *folding("computed twice")),
)
ERRORS, TIME, TILES = "errors", "time", "tiles"  # what a row has
_SAME = ["device", "version", "dtype", "family", "gradient", "seqlen_k", "has"]  # rows of which the last counts


def latest(frame: pd.DataFrame, on_gpu: bool = True) -> pd.DataFrame:
    """The newest row of each kernel, dtype, family and length, from the device it last ran on: a GPU, or not.

    Tiles are the emulator's in any case: those of most keys.
    """
    frame = frame.assign(gradient=[name if name in GRADIENTS else "" for name in frame["gradient"]])  # "": O
    are_tiles = frame["computed_twice"].notna()
    rows = frame[~are_tiles & ((frame["device"] != "emulator") == on_gpu)]
    rows = rows[rows["device"] == rows.groupby("version")["device"].transform("last")]
    tiles = frame[are_tiles & (frame["seqlen_k"] == frame["seqlen_k"][are_tiles].max())]
    rows = pd.concat([rows, tiles]) if len(rows) else rows
    has = np.select([rows["time_us"].notna(), rows["computed_twice"].notna()], [TIME, TILES], ERRORS)
    rows = rows.assign(has=has).drop_duplicates(_SAME, keep="last")
    return rows.assign(strain=_strains(rows).max(axis=1), strained=_names(_strains(rows)))


def _strains(rows: pd.DataFrame) -> pd.DataFrame:
    """Each error as a part of what its bar allows."""
    allowed = rows["mean_bar"] + STANDARD_ERRORS * rows["mean_stderr"]
    return pd.DataFrame(
        {
            "rms": rows["rms_error"] / rows["rms_bar"],
            "mean": rows["mean_error"].abs() / allowed,
            "lse": rows["lse_error"] / rows["lse_bar"],
            "ulps": rows["max_ulps"] / rows["max_ulps_bar"],
        },
        dtype=float,
    )


def _names(strains: pd.DataFrame) -> pd.Series[str]:
    """Which bar each row is nearest to, or farthest beyond."""
    return strains.fillna(0.0).idxmax(axis=1)


@dataclass(frozen=True)
class KernelAccuracy:
    """One kernel and dtype: how many bars it meets, and where it does worst."""

    version: str
    dtype: str
    judged: int
    missed: int
    worst: Any  # the row of its worst family and length
    slowest: Any  # the row of the family that takes the longest; None where nothing was timed
    twice: Mapping[str, float] | None  # the families with tiles computed twice, and their share; None: not counted

    def cells(self) -> list[str]:
        """One for each of COLUMNS, which stand behind the kernel's name."""
        row = self.worst
        is_yardstick = row.verdict == YARDSTICK
        return [
            self.dtype,
            "yardstick" if is_yardstick else f"{self.judged - self.missed} of {self.judged}",
            row.family,
            f"{row.seqlen_k:,}",
            "" if is_yardstick else f"{row.strain:.3g} ({row.strained})",
            f"{row.rms_error:.2g}",
            f"{row.mean_error:+.1g}",
            "" if pd.isna(row.lse_error) else f"{row.lse_error:.1g}",
            "" if self.slowest is None else f"{self.slowest.family} {self.slowest.time_ratio:.2f}",
            "" if self.twice is None else _listed(self.twice),
        ]


def kernels(rows: pd.DataFrame) -> Iterator[KernelAccuracy]:
    """Each kernel and dtype of `latest`: official kernels first, then rungs."""
    order = sorted(rows["version"].unique(), key=lambda name: (_is_rung(name), name))
    for version in order:
        for dtype, group in rows[rows["version"] == version].groupby("dtype"):
            judged, timed, counted = (group[group["has"] == kind] for kind in (ERRORS, TIME, TILES))
            if judged.empty:
                continue
            key = "rms_error" if judged["verdict"].iloc[0] == YARDSTICK else "strain"
            yield KernelAccuracy(
                version=str(version),
                dtype=str(dtype),
                judged=len(judged),
                missed=int((judged["verdict"] == MISSED).sum()),
                worst=next(judged.loc[[judged[key].idxmax()]].itertuples()),
                slowest=next(timed.loc[[timed["time_ratio"].idxmin()]].itertuples()) if len(timed) else None,
                twice=_twice(counted) if len(counted) else None,
            )


def worst(rows: pd.DataFrame) -> Table:
    """The worst family of each kernel of `latest`, for the terminal: those of COLUMNS that have something to say."""
    lines = [(short(kernel.version), *kernel.cells()) for kernel in kernels(rows)]
    known = [any(cells) for cells in zip(*lines, strict=True)]  # times are a GPU's, tiles the emulator's
    columns, *cells = (list(compress(line, known)) for line in (("kernel", *COLUMNS), *lines))
    return table("The worst family of each kernel", columns, cells)


def gradients(rows: pd.DataFrame) -> Table:
    """The RMS errors of dQ, dK and dV, as parts of the gradient's RMS, for the terminal: a line for each kernel of
    `latest`, dtype and family, at the number of keys where one is largest beside the yardstick's."""
    case = ["dtype", "family", "seqlen_k", "gradient"]
    is_yardstick = rows["verdict"] == YARDSTICK
    theirs = rows[is_yardstick][[*case, "version", "rms_error"]]
    both = rows[~is_yardstick].merge(theirs, on=case, suffixes=("", "_theirs"))
    both["ratio"] = both["rms_error"] / both["rms_error_theirs"]
    lines = []
    for (version, dtype, family), group in both.groupby(["version", "dtype", "family"], sort=False):
        keys = group["seqlen_k"][group["ratio"].fillna(0.0).idxmax()]
        at = group[group["seqlen_k"] == keys].set_index("gradient")
        cells = [f"{at['rms_error'][name]:.2g} ({at['ratio'][name]:.3f})" for name in GRADIENTS]
        lines.append((short(str(version)), dtype, family, f"{keys:,}", *cells))
    beside = " and ".join(theirs["version"].unique())
    title = f"RMS errors of gradients, and how many times those of {beside} they are"
    return table(title, ["kernel", "type", "family", *numbers("keys", "dQ", "dK", "dV")], lines)


def _twice(counted: pd.DataFrame) -> dict[str, float]:
    again = counted[counted["computed_twice"] > 0]
    return dict(zip(again["family"], again["computed_twice"], strict=True))


def _listed(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{family} {share:.1%}" for family, share in shares.items()) or "none"


def missed(rows: pd.DataFrame) -> list[str]:
    """A line for each kernel, dtype, family and gradient that missed a bar: which, and with how many keys."""
    found = rows[(rows["verdict"] == MISSED) & rows["version"].map(_is_rung).astype(bool)]
    return [
        f"{', '.join(filter(None, (title(str(version)), dtype, family, gradient)))}: {_bars(group)}"
        for (version, dtype, family, gradient), group in found.groupby(["version", "dtype", "family", "gradient"])
    ]


def _bars(group: pd.DataFrame) -> str:
    keys = {
        bar: [f"{row.seqlen_k:,}" for row in group.itertuples() if bar in row.missed.split()]
        for bar in ("rms", "mean", "lse", "ulps", "time")
    }
    return "; ".join(f"{bar} with {', '.join(lengths)} keys" for bar, lengths in keys.items() if lengths)


def title(version: str) -> str:
    """A kernel's name for readers."""
    if official := baselines.titles().get(version):
        return official
    return f"{short(version)} {catalog.find(version).title}" if _is_rung(version) else version


def short(version: str) -> str:
    """A kernel's name for terminals."""
    return catalog.address_of(version) if _is_rung(version) else version


def _is_rung(version: str) -> bool:
    return catalog.address_of(version)[-2:].isdigit()
