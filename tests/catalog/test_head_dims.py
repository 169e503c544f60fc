"""Which kernel a head_dim runs on: of that many columns, or of the next of those that kernels are compiled for."""

import dataclasses

import pytest

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.config import load_gpu
from flashladder.common.problem.head_dims import padded_head_dim
from flashladder.common.problem.problem import Problem


def test_the_next_one_of_multiples_of_8():
    padded = {8: 64, 64: 64, 72: 96, 104: 128, 136: 192, 200: 256, 256: 256, 264: 512, 512: 512}
    assert {head_dim: padded_head_dim(head_dim) for head_dim in padded} == padded
    for neither in (59, 100, 300, 520):
        assert padded_head_dim(neither) == neither


@pytest.mark.parametrize(
    ("head_dim", "options", "address"),
    [
        (40, {}, "49"),
        (72, {"window_left": 9}, "49"),
        (120, {"softcap": 2.0}, "49"),
        (136, {}, "49"),
        (200, {}, "49"),
        (200, {"window_left": 9}, "49"),
        (80, {"alibi": True}, "49"),
        (264, {}, "50"),
        (504, {"window_left": 9, "softcap": 2.0, "alibi": True, "sinks": True}, "50"),
        (320, {"dropout_p": 0.1}, "24"),
    ],
)
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_what_attention_runs(head_dim, options, address, gpu):
    gpu, problem = load_gpu(gpu), Problem(seqlen_q=64, head_dim=head_dim, **options)
    rung, config = catalog.choice(problem, catalog.Card(gpu.arch, gpu))
    assert rung.address == (address if gpu.name == "h200" else "24")
    assert config.head_dim == padded_head_dim(head_dim)
    assert config.as_dict().get("narrower") in (None, True)


@pytest.mark.parametrize(
    ("widths", "options", "address", "kernel_head_dim_v"),
    [
        ((192, 128), {}, "49", 128),
        ((136, 40), {"window_left": 9}, "49", 64),
        ((192, 136), {}, "49", 192),
        ((96, 40), {}, "49", 64),
        ((64, 64), {"sinks": True}, "49", 64),
        ((96, 96), {"sinks": True}, "49", 96),
        ((256, 40), {"sinks": True}, "49", 64),
    ],
)
def test_what_attention_runs_where_v_is_narrower_or_with_sinks(widths, options, address, kernel_head_dim_v):
    gpu, (head_dim, head_dim_v) = load_gpu("h200"), widths
    problem = Problem(seqlen_q=64, head_dim=head_dim, head_dim_v=head_dim_v, **options)
    rung, config = catalog.choice(problem, catalog.Card(gpu.arch, gpu))
    assert (rung.address, config.head_dim) == (address, padded_head_dim(head_dim))
    assert config.as_dict().get("head_dim_v") == kernel_head_dim_v
    rung.check(problem, config)
    before, _ = catalog.choice(problem, catalog.Card("sm_80", load_gpu("a100")))
    assert before.address == "24"


def test_a_kernel_with_head_dims_apart_has_both_in_its_configuration():
    rung = catalog.find("48")
    config = rung.config(head_dim=192)
    assert (config.head_dim_v, rung.parse_config(config.name)) == (128, config)
    rung.check(Problem.of_config(rung.operation, config), config)
    assert "constexpr int head_dim_v = 128;" in config.header()
    assert "head_dim_v" not in rung.config(head_dim=64).fields
    assert "constexpr int head_dim_v = head_dim;" in rung.config(head_dim=64).header()
    with pytest.raises(ConfigError, match="no kernel for head_dim=64 with head_dim_v=128: that has 64"):
        rung.config(head_dim=64, head_dim_v=128)
    with pytest.raises(UnsupportedProblemError, match="takes head_dim_v in multiples of 8 up to 128 with head_dim=192"):
        rung.config_for(Problem(head_dim=192))
    assert {config.as_dict().get("head_dim_v") for config in rung.space()} == {None, 128}


def test_a_narrower_v_has_defaults_of_its_own():
    rung = catalog.find("49")
    apart, even = (rung.config_for(Problem(head_dim=192, head_dim_v=head_dim_v)) for head_dim_v in (128, 192))
    assert (apart.head_dim_v, apart.block_n, apart.ones) == (128, 96, True)
    assert (even.head_dim_v, even.block_n, even.ones) == (192, 96, True)
    fault = dataclasses.replace(rung, defaults_apart={192: {"num_stages": 4}})
    with pytest.raises(ConfigError, match="a CTA has at most 227 KB"):
        fault.check_choices()


@pytest.mark.parametrize("option", ["causal", "window", "softcap", "alibi", "sinks", "dropout", "packed"])
def test_the_newest_rung_takes_each_pair_of_head_dims_with_each_option(option):
    rung = catalog.find("49")
    for head_dim in rung.supports.head_dim:
        for head_dim_v in rung.supports.head_dim_v:
            if head_dim_v <= head_dim:
                rung.config(head_dim=head_dim, head_dim_v=head_dim_v, **{option: True})


def test_its_winners_where_v_is_narrower():
    kinds = winners.names_for(Problem(head_dim=192, head_dim_v=128))
    assert {kind.partition(",causal")[0] for kind in kinds} == {"dtype=bf16,head_dim=192,head_dim_v=128"}
    winner = winners.Winner("h200", catalog.find("48").name, kinds[0], {"block_n": 64}, {})
    assert (winners.standing(winner).head_dim_v, winners.standing(winner).block_n) == (128, 64)


def test_a_problem_of_its_configuration_is_one_that_it_takes():
    rung = catalog.find("24")
    for head_dim in (72, 96):
        config = rung.config_for(Problem(head_dim=head_dim))
        rung.check(Problem.of_config(rung.operation, config), config)


def test_winners_are_of_one_head_dim():
    kinds = winners.names_for(Problem(seqlen_q=64, head_dim=72))
    assert [kind.split(",")[1] for kind in kinds] == 3 * ["head_dim=72"]
    winner = winners.Winner("h200", catalog.find("47").name, kinds[0], {"block_n": 64}, {})
    assert (winners.standing(winner).head_dim, winners.standing(winner).block_n) == (96, 64)


def test_narrower_tensors_have_defaults_of_their_own():
    """Unless a field has its own: with dropout three consumers have no registers left."""
    rung = catalog.find("48")
    usual, narrower = (rung.config_for(Problem(head_dim=head_dim)) for head_dim in (128, 120))
    assert (usual.block_m, narrower.block_m, narrower.block_n) == (128, 192, 64)
    changed = rung.config_for(Problem(head_dim=120), block_n=96)  # of the rung's own
    assert (changed.block_m, changed.num_stages) == (usual.block_m, usual.num_stages)
    assert rung.config_for(Problem(head_dim=120, dropout_p=0.1)).block_m == 128


def test_a_rung_without_it_takes_its_own_alone():
    for rung, words in (
        (catalog.find("23"), "64, 96, 128, 256, not 72"),
        (catalog.find("48"), "64, 128, or a multiple"),
    ):
        with pytest.raises(UnsupportedProblemError, match=f"takes head_dim {words}"):
            rung.config_for(Problem(head_dim=72))
