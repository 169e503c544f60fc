"""What is searched: the space of a rung, its kernels told apart by machine code, and what is left out."""

import dataclasses

import pytest

from flashladder.common import catalog
from flashladder.common.catalog import winners
from flashladder.common.compiler import build_one
from flashladder.common.compiler.artifact import CUBIN
from flashladder.common.compiler.cubin import code_digest, sections
from flashladder.common.errors import BuildError, ConfigError, UnsupportedProblemError
from flashladder.common.problem.config import KernelConfig, load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.tests.support.tiny_ladder import VERSION_YAML, make_rung
from flashladder.tuner.candidates import compile_all
from flashladder.tuner.space import Space

H100 = load_gpu("h100")
PROBLEM = Problem(batch=1, num_heads=2, seqlen_q=256)


@pytest.fixture(autouse=True)
def no_winners(monkeypatch, tmp_path):
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")


ONE_LEVEL = {"ptxas_level": (3,)}


def space_of(number, *problems):
    return Space.of(catalog.find(number), problems or (PROBLEM,))


def test_a_space_has_every_valid_configuration_and_the_problem_s_own_fields_no_more():
    version = catalog.find("16")
    space = space_of("16")
    of_the_dtype = [config for config in version.space() if config.dtype == "bf16"]
    assert len(space.configs) == len(set(space.configs)) == 2 * len(of_the_dtype), "at two levels of ptxas"
    assert "dtype" not in space.fields
    assert "row_stride" not in space.fields
    assert space.default in space.configs
    full = space.full(space.default, PROBLEM)
    assert (full.dtype, full.row_stride) == ("bf16", 256)
    assert full.block_m == space.default.block_m


def test_tiles_that_do_not_divide_the_lengths_are_left_out():
    space = space_of("02", Problem(seqlen_q=64, seqlen_k=64))
    assert {config.block_m for config in space.configs} == {64}
    assert {config.block_n for config in space.configs} == {32, 64}
    both = space_of("02", Problem(seqlen_q=64, seqlen_k=64), Problem(seqlen_q=256))
    assert both.configs == space.configs


@pytest.mark.parametrize(("number", "default"), [("02", 3), ("16", 3), ("20", 3), ("22", 1), ("24", 1)])
def test_every_space_has_the_compiler_s_level(number, default):
    space = space_of(number)
    assert space.fields["ptxas_level"] == (1, 3)
    assert space.default.ptxas_level == default
    levels = [
        config for config in space.configs if space.default.as_dict() == config.as_dict() | {"ptxas_level": default}
    ]
    assert {config.ptxas_level for config in levels} == {1, 3}


def test_a_configuration_is_spelled_without_what_goes_without_saying():
    woven, plain = space_of("22"), space_of("16")
    assert woven.declared(woven.default)["ptxas_level"] == 1
    assert "ptxas_level" not in plain.declared(plain.default)
    other = KernelConfig.of(**{**plain.default.as_dict(), "ptxas_level": 1})
    assert plain.declared(other) == other.as_dict()


@pytest.mark.parametrize("limit", [2, 40, 10_000])
def test_of_a_space_the_part_near_its_seeds(limit):
    space = space_of("16")
    seeds = [space.default, next(config for config in space.configs if config.block_m == 64)]
    part = space.near(seeds, limit)
    assert part == [config for config in space.configs if config in part], "in declared order"
    assert len(part) == min(limit, len(space.configs))

    def away(config):
        free = {name: value for name, value in config.items if name != "ptxas_level"}
        return min(sum(seed.as_dict()[name] != value for name, value in free.items()) for seed in seeds)

    left_out = set(space.configs) - set(part)
    assert max(map(away, part)) <= min(map(away, left_out), default=99)
    assert {1, 3} == {config.ptxas_level for config in part if away(config) == 0}


def test_a_space_can_be_narrowed():
    only = {"block_m": (128,), "num_warps": (4,), "ptxas_level": (1,)}
    whole, part = space_of("16"), Space.of(catalog.find("16"), (PROBLEM,), only=only)
    kept = (128, 4, 1)
    assert list(part.configs) == [c for c in whole.configs if (c.block_m, c.num_warps, c.ptxas_level) == kept]
    assert part.default == whole.default
    assert part.default not in part.configs
    assert part.seeds("h100")[0] == part.default
    assert part.fields["block_m"] == (128,)
    assert part.fields["ptxas_level"] == (1, 3), "the default's value is one that a trial may have"
    assert part.fields["block_n"] == whole.fields["block_n"]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ({"block_m": (96,)}, "block_m=96 is not one of 64, 128, which 16_static_stride takes"),
        ({"copy_pieces": (2,)}, "16_static_stride has no field copy_pieces"),
        ({"ptxas_level": (4,)}, "ptxas_level=4 is not one of 1, 2, 3"),
        ({"head_dim": (128,)}, "head_dim follows from the problem"),
    ],
)
def test_values_that_a_space_cannot_be_narrowed_to(only, message):
    with pytest.raises(ConfigError, match=message):
        Space.of(catalog.find("16"), (PROBLEM,), only=only)


def test_problems_that_a_rung_does_not_take():
    with pytest.raises(UnsupportedProblemError, match="02_swizzling has no causal mask"):
        space_of("02", Problem(causal=True))
    with pytest.raises(UnsupportedProblemError, match="multiples of block_m=64, not 32"):
        space_of("02", Problem(seqlen_q=32, seqlen_k=64))


def test_earlier_winners_are_tried_first_the_nearest_before_others():
    kind = "dtype=bf16,head_dim=128,causal=false"
    winners.save("a100", "02_swizzling", kind, {"block_n": 32}, {})
    winners.save("h100", "16_static_stride", kind, {"block_n": 128, "double_buffer": True}, {})
    winners.save("h100", "02_swizzling", kind, {"q_fragments": 2}, {})
    winners.save("h100", "01_base", kind, {"block_n": 999 * 16}, {})
    space = space_of("02")
    default = space.default.as_dict()
    assert space.seeds("h100") == [
        space.default,
        KernelConfig.of(**{**default, "q_fragments": 2}),
        KernelConfig.of(**{**default, "block_n": 128}),
        KernelConfig.of(**{**default, "block_n": 32}),
    ]


def test_a_damaged_file_of_winners_is_named(tmp_path):
    winners.FOLDER.mkdir()
    (winners.FOLDER / "h100.yaml").write_text("02_swizzling: [1, 2]")
    with pytest.raises(ConfigError, match=r"h100.yaml is damaged: it should map rungs to their winners"):
        space_of("02").seeds("h100")
    (winners.FOLDER / "h100.yaml").write_text("02_swizzling: {kind: {config: block_m=1000000000x}}")
    with pytest.raises(ConfigError, match="the winner of 02_swizzling is damaged"):
        winners.of_gpu("h100")
    (winners.FOLDER / "a100.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"a100.yaml cannot be read: Is a directory"):
        winners.of_gpu("a100")


def test_winners_stand_side_by_side_and_replace_their_own_kind():
    for kind, block_n in (("causal=false", 32), ("causal=true", 64), ("causal=false", 128)):
        winners.save("h100", "02_swizzling", kind, {"block_n": block_n}, {"ratio": "1.0"})
    found = {winner.kind: winner.values for winner in winners.of_gpu("h100")}
    assert found == {"causal=false": {"block_n": 128}, "causal=true": {"block_n": 64}}
    text = (winners.FOLDER / "h100.yaml").read_text()
    assert text.startswith("# The configurations that measured best on an NVIDIA H100")


def test_the_default_is_that_of_the_gpu():
    rung, rtx3090 = catalog.find("22"), load_gpu("rtx3090")
    space = Space.of(rung, (PROBLEM,), rtx3090)
    assert space.default.block_n == rung.config(rtx3090).block_n < Space.of(rung, (PROBLEM,), H100).default.block_n
    assert space.default in space.configs


@pytest.mark.slow
class TestKernels:
    """Of a rung whose double_buffer makes no difference, and whose block_n=48 does not compile."""

    YAML = VERSION_YAML.replace("  num_warps:", "  block_n: {default: 64, values: [48, 64]}\n  num_warps:")

    @pytest.fixture
    def space(self, tmp_path):
        body = 'static_assert(config::block_n == 64, "odd");'
        rung = make_rung(tmp_path / "ladder", yaml=self.YAML, body=body)
        return Space.of(rung, (Problem(head_dim=64),), only=ONE_LEVEL)

    def test_configurations_with_the_same_code_are_one_kernel(self, space):
        stock = compile_all(space, H100)
        assert stock.left_out == {"does not compile": 5}
        assert stock.num_configs == 5 < len(space.configs)
        assert len(stock.kernels) == 3
        shared = [kernel for kernel in stock.kernels if len(kernel.configs) == 2]
        assert [{config.double_buffer for config in kernel.configs} for kernel in shared] == [{False, True}] * 2
        assert stock.default == stock.kernels[0]
        assert stock.of(shared[0].configs[1]) == shared[0]

    def test_a_limit_leaves_the_default_and_what_is_near_it(self, space):
        stock = compile_all(space, H100, limit=2)
        tried = stock.num_configs + sum(stock.left_out.values())
        assert tried <= 3 < len(space.configs)
        assert stock.default == stock.kernels[0]

    def test_of_several_problems_every_kernel_counts(self, space):
        problems = (Problem(head_dim=64), Problem(head_dim=64, dtype="fp16"))
        stock = compile_all(Space.of(space.version, problems, only=ONE_LEVEL), H100)
        assert {len(kernel.artifacts) for kernel in stock.kernels} == {2}
        assert [artifact.config.dtype for artifact in stock.kernels[0].artifacts] == ["bf16", "fp16"]

    def test_what_does_not_fit_the_gpu_is_left_out(self, tmp_path):
        rung = make_rung(tmp_path / "ladder", yaml=VERSION_YAML)
        kernel = rung.kernel.read_text().replace("1024,", "config::block_m * 1024,")
        rung.kernel.write_text(kernel)
        space = Space.of(rung, (Problem(head_dim=64),), only=ONE_LEVEL)
        stock = compile_all(space, load_gpu("rtx4090"))
        assert stock.left_out == {"does not fit an SM of rtx4090": 4}
        assert {config.block_m for kernel in stock.kernels for config in kernel.configs} == {64}

    def test_an_empty_stock_says_why(self, tmp_path):
        rung = make_rung(tmp_path / "ladder", body='static_assert(sizeof(int) == 5, "odd ints");')
        with pytest.raises(ConfigError, match=r"(?s)no kernel for h100: 5 configurations: does not compile.*odd ints"):
            compile_all(Space.of(rung, (Problem(head_dim=64),), only=ONE_LEVEL), H100)

    def test_a_gpu_without_the_instructions(self, tmp_path):
        rung = make_rung(tmp_path / "ladder", yaml=VERSION_YAML.replace("ampere", "hopper"))
        with pytest.raises(ConfigError, match="uses hopper instructions"):
            compile_all(Space.of(rung, (Problem(head_dim=64),)), load_gpu("a100"))


@pytest.mark.slow
def test_spills_are_left_out_but_never_the_default():
    space = space_of("16")
    few = [space.default, *[config for config in space.configs if _spills(config)][:2]]
    space = dataclasses.replace(space, configs=tuple(few))
    assert compile_all(space, H100, spills=10_000).num_configs == 3
    stock = compile_all(space, H100, spills=0)
    assert stock.kernels == (stock.default,)
    assert stock.default.artifacts[0].local_bytes > 0
    assert stock.left_out == {"spills more than 0 bytes a thread": 2}


def _spills(config):
    return (config.block_m, config.block_n, config.num_warps, config.q_fragments) == (128, 64, 4, 0)


def test_the_digest_is_of_the_code_alone(tmp_path):
    rung = make_rung(tmp_path / "ladder")
    one = build_one(rung, rung.config(block_m=128), "sm_90a")
    same = build_one(rung, rung.config(block_m=128, double_buffer=True), "sm_90a")
    other = build_one(rung, rung.config(block_m=64), "sm_90a")
    assert one.key != same.key
    assert one.code == same.code != other.code
    assert ".text.attention_forward" in {section.name for section in sections(one.cubin)}


@pytest.mark.parametrize("content", [b"", b"no cubin", b"\x7fELF\x02" + bytes(100)])
def test_a_damaged_cubin_is_named(tmp_path, content):
    path = tmp_path / CUBIN
    path.write_bytes(content)
    with pytest.raises(BuildError, match=r"kernel\.cubin is no cubin"):
        code_digest(path)
