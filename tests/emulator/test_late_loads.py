"""What the machine code says of loads that are under way when their place is given back: class 13 of RACES.md."""

import re
from pathlib import Path

import pytest
from conftest import compiled_to

from flashladder.common import catalog
from flashladder.common.compiler import build_one, sass
from flashladder.common.compiler.sass.instruction import NO_BARRIER

KERNEL = re.compile(r"^\w*KERNEL\((\w+), (\w+)\)", re.MULTILINE)
ENTRIES = {"_".join(found) for found in KERNEL.findall(Path(__file__).with_name("proxies.cu").read_text())}


def under_way_at_arrivals(instructions, loads=("LDS", "LDSM")):
    """By arrival at an mbarrier, in the order of the code: the loads before it that no scoreboard was waited for."""
    flying, found = {}, []
    for i in instructions:
        flying = {board: load for board, load in flying.items() if not i.control.wait_mask >> board & 1}
        if i.base in loads and i.control.write_barrier != NO_BARRIER:
            flying[i.control.write_barrier] = i
        if i.opcode.startswith(("MEMBAR", "FENCE.VIEW.ASYNC")):
            flying = {}  # memory accesses before it are done
        if i.opcode.startswith("SYNCS.ARRIVE"):
            found.append(list(flying.values()))
    return found


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory):
    cubin = compiled_to("cubin", "sm_90a", "proxies.cu", tmp_path_factory)
    return lambda entry: sass.disassemble(cubin, ENTRIES - {entry})


def test_an_arrival_waits_for_no_load(machine_code):
    """Though it releases. If a later ptxas does wait, RACES.md has to say so."""
    assert any(under_way_at_arrivals(machine_code("held_tile_no_read_fence")))


@pytest.mark.parametrize("entry", ["held_tile_none", "held_tile_read_fence"])
def test_a_proxy_fence_or_a_product_does(machine_code, entry):
    assert not any(under_way_at_arrivals(machine_code(entry)))


def test_q_is_given_back_when_it_has_come():
    version = catalog.find("34")
    code = sass.read(build_one(version, version.config(), "sm_90a")).instructions
    assert any(i.base == "LDSM" for i in code)
    assert not any(under_way_at_arrivals(code, ("LDSM",)))
