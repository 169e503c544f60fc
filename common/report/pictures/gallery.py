"""Every picture that is kept in the repository, by its path, and whether it is still what the code says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from flashladder.common import catalog
from flashladder.common.api import masks as named_masks
from flashladder.common.api.mask_blocks import mask_blocks
from flashladder.common.catalog import loading, schema
from flashladder.common.catalog.instruction_sets import INSTRUCTION_SETS
from flashladder.common.compiler import BuildRequest, build
from flashladder.common.compiler.sass import read
from flashladder.common.compiler.sass.diff import comparable_configs
from flashladder.common.errors import unknown
from flashladder.common.paths import REFERENCES, ROOT, VERSIONS
from flashladder.common.problem.problem import Problem
from flashladder.common.report import masks
from flashladder.common.report.charts import traffic
from flashladder.common.report.charts.theme import Chart
from flashladder.common.report.pictures import layouts, loops, roles, timelines
from flashladder.common.report.pictures.device import DeviceHeaders, device_headers
from flashladder.common.report.sections import Section, compiler
from flashladder.common.studies.timeline import events

Picture = Section | Chart
ALL = ""  # the whole file
DRAWINGS: dict[str, Callable[[DeviceHeaders], str]] = {  # as the `pictures` of a version.yaml name them
    "accumulator": layouts.accumulator,
    "copy_map": layouts.copy_map,
    "ldmatrix_lanes": layouts.ldmatrix_lanes,
    "panels": layouts.panels,
    "quad_columns": layouts.quad_columns,
    "row_major_banks": partial(layouts.banks, layout="RowMajor"),
    "swizzled_banks": partial(layouts.banks, layout="Swizzled"),
}


def drawn_layouts() -> list[Picture]:
    """Pictures of layouts, loop orders and roles: no compiler of CUDA has a part in them."""
    drawn = {
        rung.directory / f"{name}.svg": partial(_drawn, rung, drawing)
        for rung in catalog.select(catalog.ladders())
        for name, drawing in rung.pictures.items()
    }
    orders = {VERSIONS / REFERENCES / name / "order.svg": partial(loops.loop_order, name) for name in traffic.ORDERS}
    pictures = (Section(path, ALL, draw) for path, draw in {**drawn, **orders}.items())
    return [*pictures, traffic.chart(VERSIONS / "forward" / "traffic.svg")]


def recorded_timelines() -> list[Picture]:
    """A picture for each timeline that is kept in results/, beside its events."""
    return [
        Section(events.picture_of(path), ALL, partial(_timeline, path))
        for path in sorted((ROOT / "results" / "timelines").glob("*.csv.gz"))
    ]


def _timeline(path: Path) -> str:
    return timelines.draw(events.read(path))


def mask_maps() -> list[Picture]:
    """The blocks of one of the masks with names, for docs/masks.md."""
    return [Section(ROOT / "docs" / "pictures" / "mask.svg", ALL, _mask_map)]


def _mask_map() -> str:
    asked = named_masks.sinks_and_window(sinks=64, left=499)
    problem = Problem(batch=1, num_heads=1, seqlen_q=2048, head_dim=128, causal=asked["causal"])
    return masks.draw(mask_blocks(problem, asked["mask"]))


def machine_loops() -> list[Picture]:
    """For each rung from 02 up, its main loop beside that of the rung below, or of its parent."""
    rungs = [version for version in catalog.versions() if int(version.number) > 0]
    pairs = [(upper.below() or lower, upper) for lower, upper in itertools.pairwise(rungs)]
    build([request for pair in pairs for request in _requests(*pair)])
    return [Section(upper.directory / "loop.svg", ALL, partial(_machine_loop, lower, upper)) for lower, upper in pairs]


def _requests(lower: catalog.Version, upper: catalog.Version) -> Iterator[BuildRequest]:
    """Both rungs as the tables of the upper one's page have them."""
    latest = max((version.instruction_set for version in (lower, upper)), key=[*INSTRUCTION_SETS].index)
    configs = comparable_configs(lower, upper)
    return (BuildRequest(*each, INSTRUCTION_SETS[latest].arch) for each in zip((lower, upper), configs, strict=True))


def _machine_loop(lower: catalog.Version, upper: catalog.Version) -> str:
    before, after = map(read, build(list(_requests(lower, upper))))
    return loops.machine_loop(before, after, compiler())


def _drawn(rung: catalog.Version, drawing: schema.Drawing) -> str:
    """What a rung names. ConfigError where there is no such drawing."""
    with loading.named_in_errors(rung.directory / schema.FILE):
        if isinstance(drawing, dict):
            return roles.sketch(drawing)
        if drawing not in DRAWINGS:
            raise unknown("drawing", drawing, DRAWINGS)
    return DRAWINGS[drawing](device_headers())
