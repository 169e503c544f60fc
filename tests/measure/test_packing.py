"""The lengths of which packed sequences are timed, and what they are compared with."""

import re
from dataclasses import replace

import pytest
import torch

from flashladder.common import catalog, console
from flashladder.common.errors import ConfigError
from flashladder.common.measure import packing
from flashladder.common.measure.baselines.packed import BASELINES
from flashladder.common.paths import PUBLISHED, ROOT
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.common.records.run_files import RunLog
from flashladder.common.runtime import target
from flashladder.tests.support import fake_gpu
from flashladder.tools.commands import packed


@pytest.mark.parametrize("mix", packing.MIXES)
@pytest.mark.parametrize("tokens", [4096, 16384, 20000])
def test_all_tokens_are_in_a_sequence(mix, tokens):
    found = packing.lengths(mix, tokens)
    assert sum(found) == tokens
    assert min(found) > 0
    assert found == packing.lengths(mix, tokens), "the same for a seed"
    assert {"equal": max(found) == 2048, "one long": max(found) == tokens // 2, "spread": len(found) > 1}[mix]


def test_wrong_mixes_are_refused():
    with pytest.raises(ConfigError, match="no mix odd of lengths; there are equal, spread, one long"):
        packing.lengths("odd", 16384)
    with pytest.raises(ConfigError, match="tokens=100: must be at least 4096"):
        packing.lengths("equal", 100)


def test_padding_has_the_longest():
    problem = Problem(operation="packed", seqlens_q=(3, 9, 0), num_heads=2, causal=True)
    assert packing.padded(problem) == Problem(batch=3, seqlen_q=9, num_heads=2, causal=True)


def test_torchs_kernel_takes_what_it_is_given():
    names = [each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[:10] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "return_debug_mask"),
    ]


@pytest.mark.slow
def test_the_benchmark_logs_what_attention_launches(monkeypatch, tmp_path, capsys):
    """On a stand-in for an H100: the rung for packed sequences beside padding, and a row for each."""
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))
    fake_gpu.install(monkeypatch)
    monkeypatch.setitem(BASELINES, "fa2", replace(BASELINES["fa2"], bind=fake_gpu._attention))
    monkeypatch.setattr(packing, "lengths", lambda *_: (10, 20))
    options = ["--tokens", "4096", "--heads", "1", "--rounds", "2", "--causal", "no"]
    assert console.run(packed.main, packed.parser(), options) == 0
    assert "equal, full: 2 sequences of 10 to 20 tokens" in capsys.readouterr().out
    rows, _ = records.packed("h100").read()
    assert list(rows["contender"]) == 3 * ["fa2", "packed", "padded"]
    names = 2 * [catalog.choice(Problem(), target.resolve("gpu", None).card)[0].name]
    assert list(rows["version"][:3]) == ["fa2", *names]
    assert rows["passed"].all()
    assert list(rows["mix"].unique()) == list(packing.MIXES)
    assert [*rows.loc[0, ["tokens", "batch", "shortest", "longest"]]] == [30, 2, 10, 20]
    flops = 4 * 128 * (10**2 + 20**2)
    assert rows["tflops"][2] == pytest.approx(flops / rows["time_us"][2] / 1e6), "of the work without padding"


@pytest.mark.slow
def test_a_configuration_may_be_asked_for(monkeypatch):
    """Of packed sequences; padded ones run as `attention` runs them."""
    fake_gpu.install(monkeypatch)
    problem = Problem(operation="packed", seqlens_q=(100, 200), causal=True)
    place = target.resolve("gpu", None)
    usual = packing.kernels(problem, catalog.FASTEST, place)
    asked = packing.kernels(problem, "46@block_n=64", place)
    assert usual["packed"].version == catalog.choice(problem, place.card)[0].name
    assert (catalog.find("46").config_for(problem).block_n, asked["packed"].config.block_n) == (128, 64)
    assert asked["padded"].code == usual["padded"].code


def published(rung):
    """The rows of an H200 that a rung's page shows, by its words for them: its first run of each head_dim."""
    rows, damaged = RunLog(PUBLISHED, "packed_h200", records.PACKED).read()
    assert not damaged
    assert rows["passed"].all()
    of_rung = rows["run"].isin(rows["run"][rows["version"].eq(rung.name) & rows["contender"].eq("packed")])
    rows = rows[of_rung & rows["dtype"].eq("bf16") & rows["num_heads_k"].eq(16)]
    for _, of_size in rows.groupby("head_dim"):
        for (causal, mix), group in of_size[of_size["run"] == of_size["run"].min()].groupby(["causal", "mix"]):
            yield f"d{group['head_dim'].iloc[0]}{' causal' if causal else ''}, {mix}", group.set_index("contender")


@pytest.mark.parametrize("name", ["packed_sequences", "place_of_q"])
def test_what_the_pages_show_is_in_the_log(name):
    rung = catalog.find(name)
    page = "".join(path.read_text() for path in sorted(rung.directory.glob("*.md")))
    table = [line.split("|")[1:-1] for line in page.splitlines() if re.match(r"\| d\d+[ ,]", line)]
    shown = {name.strip(): cells for name, *cells in table}
    columns = ("packed", "fa2", "fa3", "padded")
    for name, group in published(rung):
        rates = [f"{group['tflops'].get(column):.0f}" if column in group.index else "" for column in columns]
        assert [cell.strip() for cell in shown[name]] == rates


def test_what_the_docs_say_of_packed_sequences_is_on_the_page_of_the_rung():
    said = " ".join((ROOT / "docs" / "models.md").read_text().split())
    means = re.search(r"With packed sequences \[rung 49\]\(\S+\) is (.*?) times as fast as the fastest", said)[1]
    page = " ".join((catalog.find("every_width").directory / "measured.md").read_text().split())
    assert f"the fastest / this rung at 64, 128, 192, 256: {means.replace(' and', ',')} in the mean" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert console.run(packed.main, packed.parser(), []) == console.EXIT_ERROR
    assert re.search("no NVIDIA driver|no GPU|CUDA", capsys.readouterr().err)
