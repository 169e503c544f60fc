"""Time stamps: that they change nothing but time, what they are taken to mean, and `flashladder timeline`."""

import ctypes
import dataclasses
import gzip
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest

from flashladder.common import catalog, console, emulator
from flashladder.common.compiler import BuildRequest, build_one, translate
from flashladder.common.errors import BuildError, DeviceError, ResultsError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.report.pictures import timelines
from flashladder.common.runtime import gpu
from flashladder.common.runtime.execute import on_emulator
from flashladder.common.studies.timeline import build, events, phases, record, stamps
from flashladder.common.studies.timeline.events import QUEUE, ROOM
from flashladder.tests.support import fake_cuda
from flashladder.tests.support import made_up_timeline as made_up
from flashladder.tools.commands import timeline as tool

PROBLEM = Problem(batch=1, num_heads=2, seqlen_q=256)


def request(name, **values):
    version = catalog.find(name)
    return BuildRequest(version, version.config(**values), "sm_90a")


@pytest.fixture(scope="module")
def recorded():
    """The made-up buffer, decoded."""
    return events.Timeline(events.decode(made_up.buffer(), made_up.SITES), made_up.FACTS)


def emulated(name, monkeypatch):
    """The lanes of a rung on the emulator, whose clocks count a warp's instructions; its output is checked."""
    memories = []

    class Kept(emulator.GlobalMemory):
        def __init__(self):
            super().__init__()
            memories.append(self)

    monkeypatch.setattr(emulator, "GlobalMemory", Kept)
    tensors = make_inputs(PROBLEM)
    with build.stamped(request(name)) as kernel:
        assert kernel.flaw == ""
        assert (kernel.artifact.local_bytes, kernel.plain.local_bytes) == (0, 0)
        on_emulator(kernel.artifact, PROBLEM, tensors)
        words = memories[-1].read(f".global {stamps.BUFFER}").view(np.uint32)
        verify(expect(PROBLEM, tensors), tensors.outputs, tensors.buffers).require(name)
        return events.decode(words, kernel.sites)


@pytest.mark.parametrize(("name", "consumers", "tile"), [("26", 1, 64), ("35", 2, 128)])
@pytest.mark.slow
def test_a_stamped_rung_is_right_and_says_what_it_does(name, consumers, tile, monkeypatch):
    lanes = emulated(name, monkeypatch)
    assert {lane.warpgroup for lane in lanes if lane.consumes} == set(range(consumers))
    for lane in lanes:
        cycles = [event.cycle for event in lane.events]
        assert cycles == sorted(cycles)
        assert not lane.is_full
    blocks = [phases.blocks(lane) for lane in lanes if lane.consumes]
    tiles = PROBLEM.num_heads * PROBLEM.seqlen_q // tile
    assert sum(blocks) == consumers * tiles * PROBLEM.seqlen_k // lanes_block(name)
    consumer = next(lane for lane in lanes if lane.consumes)
    came = [event.what for event in consumer.events if event.kind == stamps.ARRIVED]
    assert {"Q", "K", "V"} <= set(came)
    started = [event.what for event in consumer.events if event.kind == stamps.ISSUED]
    assert started.count(stamps.QK) == started.count(stamps.PV)
    assert started[:2] == ([stamps.QK, stamps.PV] if name == "26" else [stamps.QK, stamps.QK])


def lanes_block(name):
    return translate(catalog.find(name), catalog.find(name).config(), "sm_90a").launch.block_n


def test_the_producer_waits_for_room_and_starts_copies(monkeypatch):
    lanes = emulated("35", monkeypatch)
    (producer, *_) = (lane for lane in lanes if not lane.consumes)
    copied = [event.what for event in producer.events if event.kind == stamps.COPY]
    assert copied[:4] == ["Q", "K", "K", "V"]
    for before, event in pairwise(producer.events):
        if event.kind == stamps.COPY:
            assert (before.kind, before.what) == (stamps.ARRIVED, f"{ROOM}{event.what}")
    own = [lane for lane in lanes if lane.cta == producer.cta]
    assert len(phases.copies(own)) == len(copied)


def test_stamps_stand_where_the_source_waits():
    version = catalog.find("35")
    sites = stamps.stamp(build_one(version, version.config(), "sm_90a")).sites
    text = version.kernel.read_text().splitlines()
    issued = {(site.what, text[site.line - 1].strip()) for site in sites if site.kind == stamps.ISSUED}
    assert (stamps.QK, "start_product<dtype, head_dim>(s, q, k_tiles.after(k_at.stage));") in issued
    assert (stamps.PV, "start_sum<dtype, block_n>(o, p, v_tiles.after(v_at.stage));") in issued
    assert {site.what for site in sites if site.kind == stamps.COPY} == {"Q", "K", "V"}


def test_a_rung_of_another_kind_is_refused():
    with pytest.raises(BuildError, match=r"24_\w+ has no products of warpgroups: time stamps are for rungs from 25 on"):
        stamps.stamp(build_one(catalog.find("24"), catalog.find("24").config(), "sm_80"))


def test_an_unknown_wait_is_refused(tmp_path):
    version = catalog.find("26")
    artifact = build_one(version, version.config(), "sm_90a")
    text = re.sub(r"@!done bra again;", "setp.ne.b32 done, 0, 0;\n@!done bra again;", artifact.ptx.read_text())
    (tmp_path / "kernel.ptx").write_text(text)
    with pytest.raises(BuildError, match=r"of the PTX waits in a loop of an unknown form:\nmbarrier"):
        stamps.stamp(dataclasses.replace(artifact, directory=tmp_path))


def test_spills_are_told(monkeypatch):
    flaw = BuildError("35 uses local memory")
    monkeypatch.setattr(build, "without_flaws", lambda *_: flaw)
    with build.stamped(request("35")) as kernel:
        assert kernel.flaw == str(flaw)


def test_a_buffer_is_decoded_across_the_end_of_the_clock(recorded):
    assert [(lane.cta, lane.warpgroup, lane.consumes) for lane in recorded.lanes] == [
        (3, 0, True),
        (3, 1, True),
        (3, 2, False),
    ]
    assert recorded.lanes[0].events[0].cycle == 0
    for lane in recorded.lanes:
        assert all(a.cycle <= b.cycle for a, b in pairwise(lane.events))
    came = [event.what for event in recorded.lanes[0].events if event.kind == stamps.ARRIVED]
    assert came[:3] == [QUEUE, "Q", "K"]


def test_an_empty_buffer_has_no_lanes():
    assert events.decode(np.zeros((stamps.EVENTS, stamps.LANES, 2), np.uint32), made_up.SITES) == ()


def test_a_full_lane_is_told():
    lanes = events.decode(made_up.buffer(tiles=60), made_up.SITES)
    assert [lane.is_full for lane in lanes] == [True, True, True]


def test_phases_have_no_gaps_and_the_lengths_that_were_made_up(recorded):
    for lane in recorded.lanes:
        spans = phases.phases(lane)
        assert all(a.end == b.begin for a, b in pairwise(spans))
        assert (spans[0].begin, spans[-1].end) == (lane.events[0].cycle, lane.events[-1].cycle)
    means = phases.means(recorded.lanes[:1])
    assert means[phases.SOFTMAX] == made_up.SOFTMAX
    assert means[phases.RESCALE] == made_up.RESCALE * (made_up.BLOCKS - 1) / made_up.BLOCKS
    assert means[phases.EPILOGUE] == pytest.approx((made_up.EPILOGUE + 20 / 3) / made_up.BLOCKS)
    assert phases.blocks(recorded.lanes[2]) == phases.blocks(recorded.lanes[0]) == 3 * made_up.BLOCKS


def test_products_are_in_flight_until_they_are_waited_for(recorded):
    spans = phases.products(recorded.lanes[0])
    of_qk = [span for span in spans if span.what == stamps.QK]
    assert len(of_qk) * 2 == len(spans)
    assert min(span.cycles for span in of_qk) >= made_up.PRODUCT
    assert all(a.begin <= b.begin for a, b in pairwise(of_qk))


def test_a_cta_takes_the_place_of_one_that_has_ended():
    def lane(cta, begin, end):
        return events.Lane(cta, 0, (events.Event(begin, stamps.BEGIN), events.Event(end, stamps.END)))

    lanes = [lane(0, 0, 10), lane(1, 0, 12), lane(7, 11, 20), lane(9, 13, 20)]
    assert [(place, own[0].cta) for place, own in phases.residents(lanes)] == [(0, 0), (1, 1), (0, 7), (1, 9)]


def test_a_timeline_is_kept_as_a_csv(recorded, tmp_path):
    path = tmp_path / "timelines" / "one.csv.gz"
    events.write(recorded, path)
    assert events.read(path) == recorded
    path = path.with_suffix("")
    path.write_bytes(gzip.decompress(path.with_name("one.csv.gz").read_bytes()))
    assert events.read(path) == recorded, "as they were kept before"
    path.write_text(path.read_text().replace("cycle", "time", 1))
    with pytest.raises(ResultsError, match=r"one.csv is no timeline .*: record it again with `flashladder timeline`"):
        events.read(path)


def test_the_picture_shows_each_role(recorded):
    drawn = timelines.draw(recorded)
    ElementTree.fromstring(drawn)
    for words in ("TMA", "producer", "MUFU", "consumer 0", "products of 1", "820.0 us instead of 800.0: +2.5%"):
        assert f">{words}" in drawn or words in drawn, words
    facts = {**recorded.facts, "flaw": "it spills"}
    assert "made worse by the stamps: it spills" in timelines.draw(events.Timeline(recorded.lanes, facts))


def test_it_is_drawn_again_without_a_gpu(recorded, tmp_path, capsys):
    path = tmp_path / "one.csv.gz"
    events.write(recorded, path)
    assert console.run(tool.main, tool.parser(), ["--draw", str(path)]) == 0
    said = capsys.readouterr().out
    assert "800.0 us without stamps, 820.0 us with them: +2.5%" in said
    assert (tmp_path / "one.svg").read_text() == timelines.draw(recorded)


def test_without_a_gpu_it_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert console.run(tool.main, tool.parser(), ["35"]) == console.EXIT_ERROR
    assert "Time stamps need a GPU: the emulator counts instructions, not cycles" in capsys.readouterr().err


def test_what_is_recorded_goes_to_the_results(recorded, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    fake_cuda.install(monkeypatch)
    asked = []
    monkeypatch.setattr(record, "record", lambda *given: asked.append(given) or recorded)
    assert console.run(tool.main, tool.parser(), ["26", "--causal"]) == console.EXIT_ERROR
    assert "causal" in capsys.readouterr().err
    assert console.run(tool.main, tool.parser(), ["26", "--seqlen", "512"]) == 0
    ((given, problem),) = asked
    assert (given.version.name, problem.seqlen_q, problem.batch) == ("26_tma", 512, 4)
    folder = tmp_path / "timelines"
    assert sorted(path.name for path in folder.iterdir()) == ["26_tma-d128-full-512.csv.gz", "26_tma-d128-full-512.svg"]
    assert "softmax" in capsys.readouterr().out


def test_a_variable_of_a_kernel_is_read_and_cleared(monkeypatch):
    driver = fake_cuda.install(monkeypatch)
    kernel = gpu.load(build_one(catalog.find("26"), catalog.find("26").config(), "sm_90a"))
    driver.variables[stamps.TAKEN] = (ctypes.c_char * 4)(*b"abcd")
    assert kernel.read_variable(stamps.TAKEN) == b"abcd"
    kernel.clear_variable(stamps.TAKEN)
    assert kernel.read_variable(stamps.TAKEN) == bytes(4)
    with pytest.raises(DeviceError, match=f"cannot find {stamps.BUFFER} in 26_tma with .*made up"):
        kernel.read_variable(stamps.BUFFER)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["29", "34"])
def test_on_a_gpu(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    assert console.run(tool.main, tool.parser(), [name, "--seqlen", "1024"]) == 0, capsys.readouterr().err
    (path,) = tmp_path.glob("timelines/*.csv.gz")
    lanes = events.read(path).lanes
    assert sum(lane.consumes for lane in lanes) >= 2
    for lane in lanes:
        assert all(a.cycle <= b.cycle for a, b in pairwise(lane.events))
