"""The pictures beside the READMEs: drawn from the code as it is, and found out of date when it changes."""

import gzip
import itertools
import shutil
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from flashladder.common import console
from flashladder.common.catalog import find, finished, references
from flashladder.common.compiler import build_one
from flashladder.common.compiler.artifact import Artifact
from flashladder.common.compiler.sass import read
from flashladder.common.errors import BuildError, ConfigError
from flashladder.common.paths import CUDA_HEADERS, VERSIONS
from flashladder.common.records import run_files
from flashladder.common.report import sections
from flashladder.common.report.pictures import device as device_module
from flashladder.common.report.pictures import gallery, layouts, loops, roles
from flashladder.common.report.pictures.device import COLS, ROWS, WARPS, device_headers
from flashladder.common.report.sections import Section
from flashladder.common.studies.timeline import events
from flashladder.tests.support import made_up_timeline
from flashladder.tests.support.made_up_timeline import FACTS
from flashladder.tests.support.tiny_ladder import VERSION_YAML, make_rung
from flashladder.tools.commands import picture


def test_the_kept_pictures_are_what_the_code_says():
    drawn = gallery.drawn_layouts()
    outdated = [each.path.relative_to(VERSIONS).as_posix() for each in drawn if not each.is_current()]
    assert not outdated, "flashladder picture brings them up to date"
    for each in drawn:
        ElementTree.parse(each.path)


def test_kept_timelines_are_drawn_from_their_events(monkeypatch, tmp_path):
    assert all(drawn.is_current() for drawn in gallery.recorded_timelines()), "flashladder picture timelines"
    kept = tmp_path / "results" / "timelines" / "one.csv.gz"
    events.write(events.Timeline(events.decode(made_up_timeline.buffer(), made_up_timeline.SITES), FACTS), kept)
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    (drawn,) = gallery.recorded_timelines()
    assert not drawn.is_current()
    assert drawn.write()
    assert drawn.is_current()
    run_files.write(kept, gzip.decompress(kept.read_bytes()).replace(b"35_own_rows", b"36_wide_heads"))
    assert not drawn.is_current()


def test_every_picture_of_a_readme_is_there():
    for readme in VERSIONS.rglob("README.md"):
        for line in readme.read_text().splitlines():
            if line.startswith("!["):
                assert (readme.parent / line.partition("](")[2].rstrip(")")).is_file(), f"{readme}: {line}"


def test_layouts_are_permutations():
    for layout in ("RowMajor", "Swizzled", "SwizzledPanels"):
        assert sorted(device_headers().lists[layout]) == list(range(ROWS * COLS))
    for copies in (device_headers().copies("by_warps"), device_headers().copies("by_cta")):
        assert sorted((row, col) for _, row, col, _ in copies) == [
            (row, col) for row in range(ROWS) for col in range(0, COLS, 8)
        ]
        assert all(place == device_headers().offset("Swizzled", row, col) for _, row, col, place in copies)
        assert {thread for thread, *_ in copies} == set(range(32 * WARPS))


def test_what_the_pictures_say():
    assert "8 wavefronts" in layouts.banks(device_headers(), "RowMajor")
    assert ": 1 wavefront," in layouts.banks(device_headers(), "Swizzled")
    assert "neighbours: no moves" in layouts.ldmatrix_lanes(device_headers())
    assert "row % 8 of thread 0: 0: one swizzle" in layouts.copy_map(device_headers())


def test_a_changed_layout_is_another_picture(monkeypatch, tmp_path):
    headers = tmp_path / "cuda"
    shutil.copytree(CUDA_HEADERS, headers)
    layout = headers / "tile" / "layout.cuh"
    layout.write_text(layout.read_text().replace("row % 8 * 8)", "row % 4 * 8)"))
    monkeypatch.setattr(device_module, "CUDA_HEADERS", headers)
    changed = device_module.device_headers.__wrapped__()
    assert "2 wavefronts" in layouts.banks(changed, "Swizzled")
    layout.write_text("#error gone\n")
    with pytest.raises(BuildError, match=r"(?s)do not compile for the host:.*gone"):
        device_module.device_headers.__wrapped__()


def test_orders_of_the_loops():
    _, by_keys = loops._watch("py_fa1", causal=False)
    _, by_rows = loops._watch("py_fa2", causal=False)
    assert by_keys[:7] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (0, 1)]
    assert by_rows[:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


@pytest.mark.parametrize("way", roles.WAYS.values(), ids=roles.WAYS)
def test_in_the_sketch_of_roles_all_is_done_once_and_in_order(way):
    bars = roles.timeline(way)
    blocks, tiles = way.blocks * way.tiles, way.tiles
    expected = {"copy of Q, K or V": tiles + 2 * blocks, "epilogue": tiles * way.consumers}
    expected |= dict.fromkeys(("Q K^T", "softmax", "P V"), blocks * way.consumers)
    assert Counter(bar.kind for bar in bars) == expected
    for row in {bar.row for bar in bars}:
        of_row = sorted((bar.begin, bar.end) for bar in bars if bar.row == row)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(of_row)), "one thing at a time"
    for c in range(way.consumers):
        kinds = [(bar.begin, bar.kind) for bar in bars if str(c) in (bar.words, bar.row[-1])]
        of_kind = {kind: sorted(begin for begin, each in kinds if each == kind) for kind in expected}
        for first, second in itertools.pairwise(("Q K^T", "softmax", "P V")):
            assert all(a < b for a, b in zip(of_kind[first], of_kind[second], strict=True)), (first, second)


def test_in_the_sketch_of_roles_each_rung_ends_sooner_than_the_one_below():
    ends = {name: max(bar.end for bar in roles.timeline(way)) for name, way in roles.WAYS.items()}
    assert ends["overlapped"] < ends["in_turn"]
    assert ends["persistent"] < ends["cta_a_tile"]


def test_a_machine_loop_has_a_stripe_for_each_instruction():
    artifact: Artifact = build_one(find("02"), find("02").config(), "sm_80")
    code = read(artifact)
    drawn = loops.machine_loop(code, code, "1.2.3")
    assert f"{code.figures()['instructions in the main loop']} instructions, 128 of them mma" in drawn
    assert "ptxas 1.2.3" in drawn
    ElementTree.fromstring(drawn)


def test_the_tool_writes_checks_and_tells_compilers_apart(monkeypatch, tmp_path, capsys):
    def call(*arguments):
        return console.run(picture.main, picture.parser(), [*arguments]), capsys.readouterr().out

    kept = tmp_path / "one.svg"
    drawn = Section(kept, gallery.ALL, lambda: "<svg/> ptxas 13.0")
    monkeypatch.setattr(sections, "compiler", lambda: "13.0")
    monkeypatch.setattr(gallery, "drawn_layouts", lambda: [drawn])
    monkeypatch.setattr(gallery, "machine_loops", list)
    monkeypatch.setattr(gallery, "mask_maps", list)
    monkeypatch.setattr(gallery, "recorded_timelines", list)
    monkeypatch.setattr(picture, "ROOT", tmp_path)
    assert call("--check")[0] == picture.EXIT_STALE
    assert not kept.exists()
    assert call() == (0, "one.svg brought up to date\n1 of 1 pictures were out of date\n")
    assert call("--check") == (0, "0 of 1 pictures are out of date\n")
    kept.write_text("<svg/> ptxas 12.9")
    code, _ = call("--check")
    assert (code, drawn.is_current()) == (0, None)
    kept.write_text("something else ptxas 13.0")
    assert call("--check", "layouts")[0] == picture.EXIT_STALE


def test_the_path_leads_through_every_rung_and_reference():
    path = (VERSIONS / "forward" / "README.md").read_text()
    beside = (VERSIONS / "README.md").read_text()
    for implementation in (*finished(), *references()):
        name = implementation.directory.name
        linked = f"({name}/README.md)" in path or f"(references/{name}/README.md)" in beside
        assert linked, f"add {implementation.name} to versions/forward/README.md"
        assert (implementation.directory / "README.md").is_file()


def test_every_rung_from_02_up_shows_its_loop():
    """`flashladder picture loops` draws it."""
    for rung in finished():
        if rung.number >= "02":
            assert "](loop.svg)" in (rung.directory / "README.md").read_text(), rung.name
            assert (rung.directory / "loop.svg").is_file()


@pytest.mark.parametrize(
    ("drawing", "message"),
    [
        ("bank", "no drawing bank; did you mean row_major_banks or swizzled_banks"),
        ('{"07": overlap}', "no way of roles overlap; did you mean overlapped"),
    ],
)
def test_a_rung_names_drawings_that_there_are(tmp_path, drawing, message):
    rung = make_rung(tmp_path, yaml=f"{VERSION_YAML}pictures: {{one: {drawing}}}\n")
    with pytest.raises(ConfigError, match=f"07_tiny/version.yaml: {message}"):
        gallery._drawn(rung, rung.pictures["one"])


def test_an_unknown_kind_is_refused_by_name(capsys):
    assert console.run(picture.main, picture.parser(), ["loop"]) == console.EXIT_ERROR
    assert "no pictures loop; did you mean loops? There are layouts, loops, masks, timelines" in capsys.readouterr().err
