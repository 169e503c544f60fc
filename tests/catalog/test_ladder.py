"""What a ladder.yaml says: that it stands, and which rungs calls launch by it."""

import itertools
import re

import pytest

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.catalog.ladder import FILE, Ladder, Launch, _read
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.paths import ROOT
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.problem import Problem, operation_named, operation_names

H100, A100 = (catalog.Card(load_gpu(name).arch, load_gpu(name)) for name in ("h100", "a100"))
OWN = {"mla": {"head_dim": 576, "head_dim_v": 512, "num_heads_k": 1}, "packed": {"seqlens_q": (1,)}}
OPERATIONS = [name for name in operation_names() if catalog.ladder_of(name).launches]


def test_every_ladder_here_has_one():
    assert {"forward", "packed", "backward", "decode", "mla"} <= set(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_names_rungs_and_what_kinds_have(operation):
    """Options that `when` reads are flags that are false by default."""
    ladder, options = catalog.ladder_of(operation), operation_named(operation).options
    kind = catalog.kind_of(
        Problem(
            operation=operation,
            seqlen_q=1,
            **({"head_dim": 576, "head_dim_v": 512, "num_heads_k": 1} if operation == "mla" else {}),
            **({"seqlens_q": (1,)} if operation == "packed" else {}),
        )
    )
    for launch in ladder.launches:
        rung = catalog.find(launch.rung)
        assert rung.operation in ladder.operations
        launch.holds(kind)
        for name in launch.config:
            assert name in rung.choices
    assert {name for name, _ in kind.options} <= {option.name for option in options}
    assert [name for name, _ in kind.classes] == list(ladder.classes)


SEQUENCES = {"operation": "decode", "head_dim": 128, "seqlen_q": 1}
LATENTS = {"operation": "mla", "head_dim": 576, "head_dim_v": 512, "num_heads_k": 1, "seqlen_q": 1}


@pytest.mark.parametrize(
    ("sizes", "card", "rung"),
    [
        ({"num_heads": 32, "num_heads_k": 8, "seqlen_k": 1024}, H100, "decode/13"),
        ({"num_heads": 32, "num_heads_k": 8, "seqlen_k": 32768}, H100, "decode/13"),
        ({"num_heads": 16, "num_heads_k": 16, "seqlen_k": 32768}, H100, "decode/07"),
        ({"num_heads": 32, "num_heads_k": 8, "seqlen_k": 1024, "batch": 8}, H100, "decode/13"),
        ({"num_heads": 32, "num_heads_k": 8, "seqlen_k": 4096, "batch": 8}, H100, "decode/07"),
        ({"num_heads": 32, "num_heads_k": 8, "seqlen_k": 1024, "options": {"num_splits": 4}}, H100, "decode/07"),
        ({"num_heads": 32, "num_heads_k": 8, "seqlen_k": 1024}, A100, "decode/06"),
        ({"head_dim": 96, "seqlen_k": 1024}, A100, "decode/10"),
        ({"window_left": 100, "seqlen_k": 1024}, H100, "decode/10"),
        ({"options": {"new_keys": True}, "seqlen_k": 1024}, H100, "decode/12"),
        ({"options": {"fp8_cache": True}, "seqlen_k": 1024}, H100, "decode/11"),
        ({"options": {"packed_q": True, "paged": True}, "seqlen_k": 1024, "seqlen_q": 99}, H100, "decode/17"),
        ({"options": {"packed_q": True, "paged": True}, "seqlen_k": 1024, "sinks": True}, H100, "decode/16"),
        ({"options": {"packed_q": True, "paged": True, "page_size": 24}, "seqlen_k": 1024}, H100, "decode/15"),
        ({"options": {"packed_q": True, "paged": True, "fp8_cache": True}, "seqlen_k": 1024}, H100, "decode/15"),
        ({"options": {"packed_q": True}, "seqlen_k": 99, "head_dim": 80, "sinks": True}, A100, "decode/15"),
        ({"options": {"fp8_cache": True, "new_keys": True}, "seqlen_k": 1024}, H100, "decode/14"),
        ({"options": {"tree": True}, "seqlen_k": 1024, "seqlen_q": 8, "causal": True}, H100, "decode/10"),
        ({"num_heads": 16, "num_heads_k": 16, "seqlen_k": 1024, "batch": 64}, H100, "decode/13"),
        ({"num_heads": 16, "num_heads_k": 16, "seqlen_k": 1024, "batch": 2}, H100, "decode/07"),
        ({"sinks": True, "num_heads": 64, "num_heads_k": 8, "head_dim": 64, "seqlen_k": 1024}, H100, "decode/13"),
        ({**LATENTS, "num_heads": 128, "seqlen_k": 32768, "batch": 64, "options": {"paged": True}}, H100, "mla/05"),
        ({**LATENTS, "num_heads": 128, "seqlen_k": 8192, "batch": 32, "options": {"paged": True}}, H100, "mla/06"),
        ({**LATENTS, "num_heads": 64, "seqlen_k": 8192, "batch": 32, "options": {"paged": True}}, H100, "mla/05"),
        ({**LATENTS, "num_heads": 64, "seqlen_k": 1024, "options": {"sparse": True}}, H100, "mla/08"),
    ],
)
def test_which_rung_calls_launch(sizes, card, rung):
    assert catalog.choice(Problem(**SEQUENCES | sizes), card)[0].address == rung


ONE = {**SEQUENCES, "num_heads": 32, "num_heads_k": 8}
LATENT = {**LATENTS, "num_heads": 128, "options": {"paged": True}}


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """There are no winners but those that this saves."""
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")

    def save(rung, problem, ratio, gpu="h100", **values):
        winners.save(gpu, catalog.find(rung).name, winners.name_of(problem), values, {"ratio": ratio})

    return save


@pytest.mark.parametrize(
    ("sizes", "first", "second"),
    [
        ({**ONE, "seqlen_k": 1024}, "decode/13", "decode/07"),
        ({**ONE, "seqlen_k": 32768}, "decode/13", "decode/07"),
        ({**LATENT, "batch": 4, "seqlen_k": 1024}, "mla/06", "mla/05"),
        ({**LATENT, "batch": 8, "seqlen_k": 1024}, "mla/06", "mla/05"),  # with clusters of 4
    ],
)
def test_of_rivals_the_faster_winner_goes_first(sizes, first, second, tuned):
    """Whatever their order says; and with the configuration that won."""
    problem = Problem(**sizes)
    assert catalog.choice(problem, H100)[0].address == first
    for ratios, best in (((1.1, 1.2), second), ((1.3, 1.2), first)):
        for rung, ratio in zip((first, second), ratios, strict=True):
            tuned(rung, problem, ratio, ptxas_level=1)
        rung, config = catalog.choice(problem, H100)
        assert (rung.address, config.ptxas_level) == (best, 1)


def test_a_winner_overrules_the_configuration_of_a_launch(tuned):
    problem = Problem(**LATENT, batch=8, seqlen_k=1024)
    assert catalog.choice(problem, H100)[1].cluster_size == 4
    tuned("mla/06", problem, 1.1, cluster_size=2)
    assert catalog.choice(problem, H100)[1].cluster_size == 2


def test_a_winner_is_for_its_class_of_sizes(tuned):
    """That of a few sequences says nothing of one, nor of many."""
    one, few, many = (Problem(**ONE, seqlen_k=1024, batch=batch) for batch in (1, 8, 64))
    tuned("decode/07", few, 1.1, num_stages=6)
    assert [catalog.choice(each, H100)[1].num_stages for each in (one, few, many)] == [3, 6, 3]


def test_no_winner_launches_a_rung_that_is_no_rival_for_the_problem(tuned):
    """Decode/13 is for few keys where there are several sequences, by `when`."""
    problem = Problem(**ONE, seqlen_k=4096, batch=8)
    tuned("decode/07", problem, 2.0)
    tuned("decode/13", problem, 3.0)
    assert catalog.choice(problem, H100)[0].address == "decode/07"


def test_what_no_rung_of_the_card_takes_is_refused_with_the_reason():
    with pytest.raises(UnsupportedProblemError, match=r"11_fp8_cache uses hopper instructions, which need sm_90a"):
        catalog.choice(Problem(**SEQUENCES, seqlen_k=99, options={"fp8_cache": True}), A100)
    with pytest.raises(UnsupportedProblemError, match=r"24_woven_general takes head_dim .*, not 520"):
        catalog.choice(Problem(seqlen_q=1, head_dim=520), H100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("operations: [forward]\nlaunch: []", "unknown key launch"),
        ("classes: {causal: batch == 1}", "causal: every kind has that field"),
        ("launches: [{rung: 1}]", "launches.0.rung"),
        ("long_from: 1", "long_from"),
        ("search: {mode: fast}", "search.mode: 'fast'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path))}/{FILE}: .*{re.escape(message)}"):
        _read(tmp_path / FILE)


def test_a_condition_reads_what_kinds_have():
    kind = catalog.kind_of(Problem(seqlen_q=1))
    assert Launch(rung="02", when="not causal and length == 'short'").holds(kind)
    with pytest.raises(ConfigError, match=r"reads batch; there are .*causal"):
        Launch(rung="02", when="batch == 1").holds(kind)


def test_a_ladder_without_a_file_has_lengths_and_no_launches():
    assert (Ladder().length_of(1), Ladder().length_of(10**6), Ladder().launches) == ("short", "long", ())


RUNG = re.compile(r"\b(?:(?:backward|decode|mla)/\d\d|\d\d_[a-z]\w+)\b")


def test_no_rung_is_named_in_code():
    """In docstrings for an example alone."""
    found = set()
    rungs = {rung.directory.name for ladder in catalog.ladders() for rung in catalog.versions(ladder=ladder)}
    for folder, path in itertools.product(("common", "tools", "tuner"), [ROOT]):
        for file in (path / folder).rglob("*.py"):
            code = re.sub(r'"""(?:.|\n)*?"""|#.*', "", file.read_text())
            if any("/" in name or name in rungs for name in RUNG.findall(code)):
                found.add(str(file.relative_to(ROOT)))
    assert not found
