"""How far the cost model's times were from a GPU's, rung by rung: `python -m flashladder.common.studies.experience`.

It prices what the latest run of the first ladder timed in bf16 at three lengths, each rung in its own configuration,
and writes the least and the greatest multiple of the predicted time that was measured to configs/cost_model.yaml. No
GPU needed: some ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import yaml

from flashladder.common import catalog
from flashladder.common.compiler import build_one
from flashladder.common.console import progress, warn
from flashladder.common.errors import FlashLadderError
from flashladder.common.paths import results_dir
from flashladder.common.predict import cost
from flashladder.common.problem.config import KernelConfig, load_gpu, parse_values
from flashladder.common.records import ladders
from flashladder.common.records.log import Damage
from flashladder.common.records.records import problem_of

GPU, KIND, DTYPE = "h200", "own", "bf16"
LENGTHS = (512, 4096, 16384)


def ratios(rows: pd.DataFrame) -> Iterator[float]:
    """Measured times of one rung as multiples of the predicted ones."""
    gpu = load_gpu(GPU)
    for row in rows.to_dict("records"):
        version, problem = catalog.find(row["version"]), problem_of(row)
        config = version.config(gpu, **parse_values(row["config"]))
        own = version.choices.keys() - {catalog.ROW_STRIDE}  # which the small problem of `conflicts` has another of
        opened = KernelConfig.of(**{name: value for name, value in config.items if name in own})
        factor = cost.conflicts(version, problem, [opened], gpu).get(cost.layout_of(opened), 1.0)
        artifact = build_one(version, config, gpu.arch)
        yield row["time_us"] / cost.time_us(problem, artifact, gpu, factor)


def main() -> None:
    damaged: list[Damage] = []
    rows = ladders.read(results_dir(), damaged)[GPU].rows
    rows = rows[(rows["kind"] == KIND) & (rows["dtype"] == DTYPE) & rows["seqlen_q"].isin(LENGTHS)]
    found: dict[str, list[float]] = {}
    with progress("rungs priced") as update:
        for done, (name, group) in enumerate(rows.groupby("version")):
            update(done, rows["version"].nunique(), str(name))
            try:
                known = [*ratios(group)]
            except FlashLadderError as error:
                warn(f"{name}: {error}")
                continue
            found[catalog.address_of(str(name))] = [round(min(known), 2), round(max(known), 2)]
            text = yaml.safe_dump({"gpu": GPU, "rungs": found}, sort_keys=False, default_flow_style=None)
            cost.EXPERIENCE.write_text(f"# Made by `python -m {__spec__.name}`.\n{text}")


if __name__ == "__main__":
    main()
