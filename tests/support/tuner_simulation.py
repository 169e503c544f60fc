"""A whole search on the simulated bench as a program: to be killed, to be interrupted, to be run many times at once.

python -m flashladder.tests.support.tuner_simulation FOLDER [storage] [workers]
"""

import argparse
import os
import sys
from pathlib import Path

from flashladder.common import console
from flashladder.common.catalog import winners
from flashladder.common.problem.config import load_gpu
from flashladder.tests.support.simulated_bench import Simulated
from flashladder.tests.support.tuner_stock import make_predictions, make_stock
from flashladder.tuner import campaign
from flashladder.tuner.job import Job, Ranking, SearchSettings
from flashladder.tuner.worker import Worker

STUDY = "simulated"
BAD = (("block_n=32,num_warps=8,q_fragments=8,k_fragments=8", "wrong"),)


class SimulatedJob(Job):
    """Its kernels were never compiled."""

    def rank(self, on_progress=None):
        every = int(os.environ.get("EVERY", "1"))
        stock = make_stock(Path(os.environ["FLASHLADDER_RESULTS"]) / "artifacts", self.space, every)
        predicted_us = make_predictions(stock)
        ranked = sorted(stock.kernels, key=lambda kernel: predicted_us[kernel.code])
        return Ranking(stock, tuple(dict.fromkeys([*stock.seeds("h100"), *ranked])), predicted_us)


def make_job(folder, storage=None):
    os.environ["FLASHLADDER_RESULTS"] = str(folder)
    winners.FOLDER = Path(folder) / "tuned"
    space = make_stock(Path(folder) / "artifacts").space
    return SimulatedJob(space, load_gpu("h100"), SearchSettings(study=STUDY, storage=storage, exhaustive=True))


def simulate(folder, storage=None, workers=1, seconds=0.03):
    """Run the search to its end."""
    job = make_job(folder, storage)
    bench = Simulated(str(Path(folder) / "journal"), seconds, BAD)
    return campaign.run([job], [Worker(bench) for _ in range(workers)])


def main(arguments):
    return simulate(arguments.folder, arguments.storage, arguments.workers, arguments.seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--storage")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.03)
    parser.add_argument("--traceback", action="store_true")
    sys.exit(console.run(main, parser))
