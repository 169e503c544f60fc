"""Writes RACES.md: the classes of races between Hopper's units, where each was seen, and how the emulator reports it.

`python tests/emulator/races_page.py` writes it anew; test_proxies.py runs every kernel in it and compares the page.
"""

from pathlib import Path

import yaml

CLASSES = Path(__file__).with_name("classes.yaml")
PAGE = Path(__file__).with_name("RACES.md")

HEAD = """# Races between Hopper's asynchronous units, and how the emulator reports them

Each class is a bug that a public kernel shipped; class 12 is from the text of PTX. The kernels are those of
[proxies.cu](proxies.cu): the right one is silent, the wrong one is reported with both of its source lines, whether
copies land as late as PTX allows or as early. `python tests/emulator/races_page.py` writes this page from
[classes.yaml](classes.yaml); `test_proxies.py` runs every line of it.

| class | seen in | kernel of proxies.cu | found as |
|---|---|---|---|
"""


TAIL = """
## A load that comes late (class 13)

A thread reads a stage, arrives at the empty barrier, and the producer's copy fills the stage again. The arrival
releases, the wait acquires, and yet the copy may overtake the read:

- **PTX**: the read is of the generic proxy, the copy of the async proxy. Operations of two proxies are in causality
  order only with a proxy fence on the way (PTX ISA 8.9.5), and only in that order a read "cannot read from" a later
  write (8.10.6). "Accessing the same memory location across multiple proxies needs a cross-proxy fence" (9.7.9.25.2).
  The text of mbarrier.test_wait says that accesses before an arrival "are performed" (9.7.13.15.16), and names no
  proxy. We take the memory model's word.
- **Others**: CUTLASS has fence_view_async_shared between the loads of its epilogue and consumer_release
  (sm90_epilogue_tma_warpspecialized.hpp). FlashAttention added it to a backward (2462). DeepEP saw wrong data, and
  put the fence between the wait and the copy (642). Triton's ConSan asks for it too (triton 10668).
- **Machine code** (ptxas 13.0, sm_90a and sm_100a): an arrival, SYNCS.ARRIVE, waits for no scoreboard of an LDS or
  LDSM before it, be it `.release` or not. A sum of what was loaded, and even an mma.sync, can come behind an arrival
  that stands after it in the source. With fence.proxy.async, MEMBAR and FENCE.VIEW.ASYNC come before the arrival,
  which waits for them. `test_late_loads.py` reads this off the machine code.

The emulator asks for a fence.proxy.async anywhere on the way from the read to the copy: by the reader, by the lane
that arrives, or by the thread that issues the copy. One thing does instead: the value became a register of a wgmma,
and wgmma.wait_group for it comes before the arrival. Then the product has read its registers, so the load has come. A
use by other instructions does not count, as ptxas may move them.

Rungs 32 to 34 gave Q back after ldmatrix until 2026-11-22. They are reported, with the lines of both; the rungs of
today wait for the first product, and are silent. On an H200 the old ones were wrong in about one row in 3,000, in
tiles of a single block. That this race was the cause fits all that is known, but it is not proven: nobody has run the
old kernels with the fence added and nothing else.
"""


def page() -> str:
    """The text of RACES.md."""
    rows = []
    for number, each in yaml.safe_load(CLASSES.read_text()).items():
        seen = "; ".join(each["seen"]) or "PTX"
        for n, case in enumerate(each["cases"]):
            name = f"{number}. {each['title']} | {seen}" if n == 0 else " | "
            rows.append(f"| {name} | `{case['entry']}` | {case.get('error', 'RaceError')}: {case['says']} |\n")
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
