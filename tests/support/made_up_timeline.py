"""A made-up buffer of time stamps: a CTA of a producer and two consumers that take turns, as rung 35 has them."""

import numpy as np

from flashladder.common.studies.timeline import stamps
from flashladder.common.studies.timeline.stamps import EVENTS, LANES, PAYLOAD_BITS, Site

KINDS = (stamps.BEGIN, stamps.REACHED, stamps.ARRIVED, stamps.STORED, stamps.STORE, stamps.REGISTERS)
SITES = (
    *(Site(kind) for kind in KINDS),
    *(Site(stamps.COPY, tensor, 67) for tensor in "QKV"),
    *(Site(stamps.ISSUED, kind, 121) for kind in (stamps.QK, stamps.PV)),
    *(Site(stamps.DONE, pending, 126) for pending in "01"),
)
BARRIERS = {"Q": 0x400, "K": 0x500, "V": 0x600}
EMPTY, NUMBER = 8, 0x700  # from a full barrier to the empty one; the barrier of tile numbers
BLOCKS, SOFTMAX, PRODUCT, RESCALE, EPILOGUE = 6, 900, 500, 60, 700
FACTS = {
    "version": "35_own_rows", "config": "dtype=bf16,head_dim=128", "problem": "batch=4,num_heads=16",
    "device": "a made-up GPU", "time": "2026-11-22", "commit": "none", "driver": "none", "toolkit": "13.0",
    "block_n": "128", "head_dim": "128", "sm_mhz": "1700", "us_without_stamps": "800.0", "us_with_stamps": "820.0",
    "registers": "168", "flaw": "",
}  # fmt: skip


class _Writer:
    """Adds stamps to a lane; the clock begins near its end, so that it starts again from 0."""

    def __init__(self, words, lane, who):
        self.words, self.lane, self.count, self.cycle = words, lane, 0, 0
        self.add(0, stamps.BEGIN, payload=who)

    def add(self, cycles, kind, what="", payload=0):
        self.cycle += cycles
        number = next(n for n, site in enumerate(SITES) if (site.kind, site.what) == (kind, what)) + 1
        if self.count < EVENTS:
            self.words[self.count, self.lane] = (self.cycle - 1000) % 2**32, number << PAYLOAD_BITS | payload
        self.count += 1


def buffer(tiles=3):
    """(EVENTS, LANES, 2) words."""
    words = np.zeros((EVENTS, LANES, 2), np.uint32)
    for warpgroup in range(2):
        _consumer(_Writer(words, warpgroup, 3 << 3 | warpgroup), tiles, late=warpgroup * 600)
    _producer(_Writer(words, 2, 3 << 3 | 2), tiles)
    return words


def _consumer(lane, tiles, late):
    def wait(tensor, cycles):
        lane.add(10, stamps.REACHED)
        lane.add(cycles, stamps.ARRIVED, payload=BARRIERS.get(tensor, NUMBER))

    lane.add(200, stamps.REGISTERS)
    for _ in range(tiles):
        wait("a number", 40)
        wait("Q", 400 + late)
        wait("K", 100)
        lane.add(40, stamps.ISSUED, stamps.QK)
        lane.add(PRODUCT, stamps.DONE, "0")
        lane.add(SOFTMAX, stamps.REACHED)
        for _ in range(BLOCKS - 1):
            lane.add(10, stamps.ARRIVED, payload=BARRIERS["K"])
            lane.add(40, stamps.ISSUED, stamps.QK)
            lane.add(10, stamps.ARRIVED, payload=BARRIERS["V"])
            lane.add(40, stamps.ISSUED, stamps.PV)
            lane.add(PRODUCT, stamps.DONE, "1")
            lane.add(SOFTMAX, stamps.REACHED)
            lane.add(150, stamps.DONE, "0")
            lane.add(RESCALE, stamps.REACHED)
        lane.add(10, stamps.ARRIVED, payload=BARRIERS["V"])
        lane.add(40, stamps.ISSUED, stamps.PV)
        lane.add(PRODUCT, stamps.DONE, "0")
        lane.add(EPILOGUE // 2, stamps.REACHED)
        lane.add(5, stamps.STORED)
        lane.add(EPILOGUE // 2, stamps.STORE)


def _producer(lane, tiles):
    def fill(tensor, cycles):
        lane.add(60, stamps.REACHED)
        lane.add(cycles, stamps.ARRIVED, payload=BARRIERS[tensor] + EMPTY)
        lane.add(5, stamps.COPY, tensor, payload=BARRIERS[tensor])

    lane.add(200, stamps.REGISTERS)
    for _ in range(tiles):
        lane.add(30, stamps.REACHED)
        lane.add(60, stamps.ARRIVED, payload=NUMBER)
        fill("Q", 20)
        fill("K", 20)
        for block in range(BLOCKS):
            if block + 1 < BLOCKS:
                fill("K", 700)
            fill("V", 900)
