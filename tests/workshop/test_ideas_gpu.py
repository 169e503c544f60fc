"""The lab's loop on a real GPU (`pytest -m gpu`): a verdict with its interval, in time, and a kernel that hangs."""

import time

import pytest

from flashladder.common import console
from flashladder.common.catalog import find
from flashladder.common.report import sections
from flashladder.common.report.pages import documents
from flashladder.common.workshop import scaffold, tried, watch
from flashladder.tests.support import ideas
from flashladder.tools.commands import run_version
from flashladder.tuner import pair

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SECONDS = 10.0  # from a save to its ratio, once the process that measures is there
LAUNCH = "params) {\n"


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path / "results"))


@pytest.fixture
def rung(tmp_path, monkeypatch):
    return ideas.begin(monkeypatch, tmp_path / "mine")


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = console.run(run_version.main, run_version.parser(), ["--device", "gpu", *arguments])
        captured = capsys.readouterr()
        print(captured.out, captured.err)  # for who reads the run
        return code, captured.out, captured.err

    return call


def test_a_slower_rung_is_measured_and_kept(rung, run):
    ideas.save(rung, "longer")
    code, out, err = run("my_idea", "--against", "02")
    assert code == 0, err
    assert "02 at batch=4,num_heads=16,seqlen_q=4096" in out
    assert "95 % interval" in out
    (row,) = tried.log_of(rung).read()[0].itertuples()
    assert row.verdict in ("faster", "slower", "tied", "unclear")
    assert row.ratio_low <= row.ratio <= row.ratio_high < 1.02
    assert row.device.startswith("NVIDIA")
    assert "NVIDIA" in sections.between(rung.directory / documents.PAGE, documents.TRIED)


def test_a_configuration_that_is_known_to_be_slower_is_found_so(rung, run):
    declared = rung.directory / "version.yaml"
    declared.write_text(declared.read_text().replace("block_n: {default: 64", "block_n: {default: 32"))
    ideas.save(rung, "unchanged")
    code, out, err = run("my_idea", "--against", "02")
    assert code == 0, err
    assert "slower than 02" in out
    assert "drop it" in out


def test_the_ratio_is_there_ten_seconds_after_a_save(tmp_path, monkeypatch, capsys):
    """Against rung 24, as the README has it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setenv("FLASHLADDER_VERSIONS", str(folder))
    rung = scaffold.make("my_idea", "24", private=True)
    text, took, try_it = rung.kernel.read_text(), [], watch._try

    def and_save(*arguments):
        begin = time.perf_counter()
        try_it(*arguments)
        took.append(time.perf_counter() - begin)
        fetch = "if (t == k_operand.count - 2) v_operand.fetch();"
        assert fetch in text
        rung.kernel.write_text(text.replace(fetch, fetch.replace("- 2", f"- {2 + len(took)}")))
        if len(took) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch, "_try", and_save)
    assert console.run(run_version.main, run_version.parser(), ["my_idea", "--watch"]) == 0
    out = capsys.readouterr().out
    print(out, took)
    assert out.count("95 % interval") == 2, "the first has its parent's machine code"
    assert took[-1] < SECONDS


def test_a_kernel_that_hangs_on_the_gpu_alone_ends_no_watch(rung, run, monkeypatch):
    """What the emulator cannot know: it counts fewer clocks than it takes to notice."""
    monkeypatch.setattr(pair, "PATIENCE", 3.0)
    text = find(ideas.PARENT).kernel.read_text()
    head, brace, body = text.partition(LAUNCH)
    assert brace
    waits = "    if (gridDim.y > 8) for (auto begin = clock64(); clock64() - begin < 400'000'000'000;) continue;\n"
    rung.kernel.write_text(head + brace + waits + body)
    code, _, err = run("my_idea", "--against", "02")
    assert code == console.EXIT_ERROR
    assert "hung on the GPU" in err
    assert "no answer within 6 s" in err
    assert not (rung.directory / "tried.csv").exists()
