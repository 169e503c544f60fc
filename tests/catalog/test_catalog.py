import re

import pytest

from flashladder.common import catalog, own
from flashladder.common.catalog import find, nearest, versions
from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.config import KernelConfig, load_gpu
from flashladder.common.problem.problem import Problem, operation_names
from flashladder.tests.support.tiny_ladder import VERSION_YAML, make_rung


@pytest.fixture
def tiny(tmp_path):
    return make_rung(tmp_path)


@pytest.mark.parametrize("name", ["07", "7", "07_tiny", "tiny"])
def test_rung_is_found_by_each_of_its_names(tiny, name):
    assert find(name, tiny.root) == tiny
    assert (tiny.number, tiny.name, tiny.title) == ("07", "07_tiny", "Tiny")


def test_unknown_rung_lists_the_known(tiny):
    with pytest.raises(ConfigError, match="no version 99; there are 07_tiny"):
        find("99", tiny.root)


def test_rungs_come_in_order_and_share_kernels(tiny):
    root = tiny.root
    make_rung(root, "08_shared", yaml=VERSION_YAML + "kernel: ../07_tiny/kernel.cu\nlocal_memory: true\n")
    make_rung(root, "00_first")
    assert [version.number for version in versions(root)] == ["00", "07", "08"]
    assert find("08", root).kernel == tiny.kernel
    assert find("08", root).local_memory
    assert not tiny.local_memory


def test_the_real_ladder_is_valid():
    numbers = [version.number for version in versions()]
    assert numbers == sorted(set(numbers))
    assert numbers[:3] == ["00", "01", "02"]


def test_config_has_defaults_in_declared_order(tiny):
    config = tiny.config(num_warps=8, block_m=128)
    assert config.name == "dtype=bf16,head_dim=64,block_m=128,num_warps=8,double_buffer=false"
    assert tiny.parse_config(config.name) == config
    assert tiny.parse_config("") == tiny.config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block_n=64", "07_tiny has no field block_n; its fields are dtype, head_dim, block_m, num_warps"),
        ("block_q=64", "unknown field block_q"),
        ("block_m=96", "block_m=96 is not one of 64, 128, which 07_tiny takes"),
        ("head_dim=256", "head_dim=256 is not one of 64, 128, which 07_tiny takes"),
        ("num_warps=8", "07_tiny: block_m=64, num_warps=8 breaks the rule"),
        ("double_buffer=true", "block_m=64, double_buffer=true breaks the rule .*: a small tile has nothing to buffer"),
    ],
)
def test_bad_config_is_refused_by_name(tiny, text, message):
    with pytest.raises(ConfigError, match=message):
        tiny.parse_config(text)


def test_any_rung_takes_a_level_of_ptxas_that_it_does_not_declare(tiny):
    config = tiny.config(ptxas_level=1, block_m=128)
    assert config.name == f"{tiny.config(block_m=128).name},ptxas_level=1"
    assert tiny.parse_config(config.name) == config
    assert "ptxas_level" not in tiny.config().fields
    assert not any("ptxas_level" in other.fields for other in tiny.space())
    with pytest.raises(ConfigError, match="07_tiny: ptxas_level=4 is not one of 1, 2, 3"):
        tiny.config(ptxas_level=4)
    with pytest.raises(ConfigError, match="breaks the rule"):
        tiny.config(ptxas_level=1, double_buffer=True)


def test_a_gpu_with_small_sms_has_defaults_of_its_own(tmp_path):
    small = "small_sm: {below: 200000, defaults: {64: {block_m: 128, num_warps: 8}}}\n"
    rung = make_rung(tmp_path, yaml=VERSION_YAML + small)
    a100, h100 = load_gpu("a100"), load_gpu("h100")
    assert rung.config(h100) == rung.config()
    assert rung.config(a100) == rung.config(block_m=128, num_warps=8)
    assert rung.config(a100, head_dim=128) == rung.config(head_dim=128)
    assert rung.config_for(Problem(head_dim=64), a100, num_warps=4) == rung.config(block_m=128)
    for wrong, message in (("below", "the key below is missing"), ("block_m", "unknown field blok_m|has no field")):
        yaml = VERSION_YAML + small.replace(wrong, wrong.replace("e", "ee").replace("block", "blok"))
        with pytest.raises(ConfigError, match=message):
            make_rung(tmp_path, "08_wrong", yaml=yaml)


def test_a_field_that_is_true_has_defaults_of_its_own(tmp_path):
    beside = "defaults_with: {double_buffer: {64: {num_warps: 8, block_m: 128}}}\n"
    rung = make_rung(tmp_path, yaml=VERSION_YAML + beside)
    config = rung.config(double_buffer=True)
    assert (config.block_m, config.num_warps, rung.config().num_warps) == (128, 8, 4)
    assert rung.changes(config) == "double_buffer=true"
    assert rung.config(double_buffer=True, num_warps=4).num_warps == 4
    with pytest.raises(ConfigError, match="has no field"):
        make_rung(tmp_path, "08_wrong", yaml=VERSION_YAML + beside.replace("num_warps", "num_wraps"))


def test_so_has_an_expression(tmp_path):
    beside = "defaults_with: {mods: {64: {num_warps: 8, block_m: 128}}}\n"
    yaml = VERSION_YAML.replace("config:", 'config:\n  mods: {default: "", values: any}') + beside
    rung = make_rung(tmp_path, yaml=yaml)
    assert [rung.config(mods=mods).num_warps for mods in ("", "mask=k<q")] == [4, 8]
    with pytest.raises(ConfigError, match="has no field"):
        make_rung(tmp_path, "08_wrong", yaml=yaml.replace("num_warps: 8", "num_wraps: 8"))


def test_space_is_every_valid_config(tiny):
    space = list(tiny.space())
    shapes = {(64, 4, False), (128, 4, False), (128, 4, True), (128, 8, False), (128, 8, True)}
    assert len(space) == len(set(space)) == 2 * 2 * len(shapes)
    assert {(config.block_m, config.num_warps, config.double_buffer) for config in space} == shapes
    assert all(isinstance(config, KernelConfig) and tiny.config(**config.as_dict()) == config for config in space)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: Tiny", "titel: Tiny", "the key title is missing"),
        ("title: Tiny", "title: Tiny\nauthor: me", "unknown key author; the keys here are addresses, config, defaults"),
        ("causal: false", "masks: false", "unknown key masks; the keys here are alibi, apart, causal, dropout, dtype"),
        ("num_warps: {default: 4, values", "num_warps: {values", "the key default is missing"),
        ("{default: 4, values: [4, 8]}", "4", "4 is not a mapping with the keys default, values"),
        ("why:", "because:", "rules.0: the key why is missing"),
        ("why:", "because:", "rules.0: unknown key because; the keys here are require, why"),
        ("title: Tiny", "title: [Tiny]", r"title: \['Tiny'\]: input should be a valid string"),
        ("default: false", "default: 0.5", "config.double_buffer.default.*: 0.5: input should be a valid"),
        (
            "supports: {",
            "supports: 3 # {",
            "supports: 3 is not a mapping with the keys alibi, apart, causal, dropout, dtype",
        ),
        ("config:", "config: [", "while parsing"),
        ("ampere", "turing", "instruction_set=turing is not one of ampere, hopper, blackwell"),
        ("dtype: [bf16, fp16]", "dtype: [fp32]", "dtype=fp32 is not one of bf16, fp16"),
        ("default: 4,", "default: 2,", "the default num_warps=2 is not among its values"),
        ("num_warps:", "warps:", "unknown field warps"),
        (
            "seqlen_q: block_m",
            "seqlen_q: block_n",
            "seqlen_q and seqlen_k are `any` or a field of the rung, not block_n",
        ),
        ("block_m == 128 or", "block_n == 128 or", "reads block_n, which the rung lacks"),
        ("block_m == 128 or not", "block_m == 128 and not", "07_tiny: block_m=64, .* breaks the rule"),
        ("rules:", "kernel: other.cu\nrules:", "there is no kernel .*other.cu"),
    ],
)
def test_bad_version_yaml_is_refused_with_its_path(tmp_path, old, new, message):
    yaml = VERSION_YAML.replace("lse: true", "causal: false, lse: true")
    assert old in yaml
    with pytest.raises(ConfigError, match=rf"(?s)07_tiny/version.yaml: .*{message}"):
        make_rung(tmp_path, yaml=yaml.replace(old, new))


def test_a_version_yaml_that_is_no_text_is_refused(tmp_path):
    make_rung(tmp_path)
    (tmp_path / "forward" / "07_tiny" / "version.yaml").write_bytes(b"title: Tiny\xff\n")
    catalog.forget()
    with pytest.raises(ConfigError, match=r"(?s)07_tiny/version.yaml: .*invalid (start byte|leading UTF-8 octet)"):
        versions(tmp_path)


@pytest.mark.parametrize(
    ("problem", "config", "message"),
    [
        (
            {"dtype": "fp16"},
            {},
            "is configured for dtype=bf16, but the problem has dtype=fp16; configured as dtype=fp16,",
        ),
        ({"head_dim": 128}, {}, "is configured for head_dim=64, but the problem has head_dim=128"),
        (
            {"head_dim": 256},
            {},
            "takes head_dim 64, 128, not 256; no rung takes the problem; with head_dim=128 11_masked_too would",
        ),
        ({"softcap": 3.0}, {}, "has no softcap; no rung takes the problem; without softcap 11_masked_too would"),
        ({"causal": True}, {}, "has no causal mask; the nearest rung that takes the problem is 09_masked"),
        ({"num_heads": 4, "num_heads_k": 2}, {}, "needs as many K/V heads as Q heads, not 4 and 2"),
        ({"seqlen_q": 192}, {"block_m": 128}, "takes seqlen_q in multiples of block_m=128, not 192"),
    ],
)
def test_unsupported_problem_is_refused_with_advice(tiny, problem, config, message):
    masked = VERSION_YAML.replace("lse: true", "causal: true, lse: true")
    make_rung(tiny.root, "09_masked", yaml=masked)
    make_rung(tiny.root, "11_masked_too", yaml=masked)
    with pytest.raises(UnsupportedProblemError, match=f"07_tiny {message}"):
        tiny.check(Problem(**{"head_dim": 64, **problem}), tiny.config(**config))


def test_supported_problem_passes(tiny):
    problem = Problem(batch=2, num_heads=3, seqlen_q=192, seqlen_k=17, head_dim=128, dtype="fp16")
    config = tiny.config_for(problem)
    assert (config.dtype, config.head_dim) == ("fp16", 128)
    tiny.check(problem, config)
    assert tiny.takes(problem)


def test_field_of_any_value_follows_the_problem(tmp_path):
    static = VERSION_YAML.replace("config:", "config:\n  row_stride: {default: 1024, values: any}")
    version = make_rung(tmp_path, yaml=static)
    assert {config.row_stride for config in version.space()} == {1024}
    with pytest.raises(ConfigError, match="row_stride=1001 breaks the rule"):
        version.config(row_stride=1001)
    problem = Problem(num_heads=3, head_dim=64)
    config = version.config_for(problem)
    assert config.row_stride == 192
    version.check(problem, config)
    with pytest.raises(UnsupportedProblemError, match="for row_stride=1024, but the problem has row_stride=192"):
        version.check(problem, version.config())
    with pytest.raises(UnsupportedProblemError, match="needs the layout bshd, whose rows are row_stride=192 apart"):
        version.check(Problem(num_heads=3, head_dim=64, layout="padded"), config)


def test_lse_follows_the_problem(tmp_path):
    choice = "config:\n  lse: {default: true, values: [true, false]}"
    version = make_rung(tmp_path, yaml=VERSION_YAML.replace("config:", choice))
    asked, bare = Problem(head_dim=64), Problem(head_dim=64, lse=False)
    assert [version.config_for(problem).lse for problem in (asked, bare)] == [True, False]
    for problem, given, wanted in ((bare, "true", "false"), (asked, "false", "true")):
        config = version.config_for(problem, lse=given == "true")
        advice = f"is configured for lse={given}, but the problem has lse={wanted}; configured as .*,lse={wanted}"
        with pytest.raises(UnsupportedProblemError, match=advice):
            version.check(problem, config)
    plain = make_rung(tmp_path, "08_plain")
    plain.check(bare, plain.config_for(bare))
    none = make_rung(tmp_path, "09_none", yaml=VERSION_YAML.replace("lse: true", "lse: false"))
    none.check(bare, none.config_for(bare))
    with pytest.raises(UnsupportedProblemError, match=r"09_none gives no log-sum-exp; the nearest rung .* is 08_plain"):
        none.config_for(asked)


def test_nearest_prefers_the_rung_above(tiny):
    root = tiny.root
    for name in ("05_below", "09_above", "12_far"):
        make_rung(root, name, yaml=VERSION_YAML.replace("seqlen_q: block_m", "seqlen_q: any"))
    best = nearest(find("07", root), Problem(seqlen_q=17, head_dim=64))
    assert best is not None
    assert best.name == "09_above"


def test_arch_must_have_the_instructions(tiny):
    hopper = make_rung(tiny.root, "20_hopper", yaml=VERSION_YAML.replace("ampere", "hopper"))
    blackwell = make_rung(tiny.root, "30_blackwell", yaml=VERSION_YAML.replace("ampere", "blackwell"))
    for arch in ("sm_80", "sm_89", "sm_90a", "sm_100a"):
        tiny.check_arch(arch)
    hopper.check_arch("sm_90a")
    blackwell.check_arch("sm_100a")
    for version, arch, message in (
        (tiny, "sm_75", "07_tiny uses ampere instructions, which need sm_80 or later, not sm_75"),
        (hopper, "sm_80", "which need sm_90a, not sm_80; of the GPUs described gh200, h100, .* have them"),
        (blackwell, "sm_90a", "30_blackwell uses blackwell instructions, which need sm_100a, not sm_90a; .* b200 have"),
        (hopper, "sm_100a", "which need sm_90a, not sm_100a"),
        (tiny, "h100", "h100 is not an arch such as sm_80 or sm_90a"),
    ):
        with pytest.raises(ConfigError, match=message):
            version.check_arch(arch)


@pytest.fixture
def two_ladders(tiny):
    """The folder of a ladder with 07_tiny, and of a second one, back, with 03_tiny and 07_masked."""
    root = tiny.root
    make_rung(root, "back/03_tiny")
    make_rung(root, "back/07_masked", yaml=VERSION_YAML.replace("lse: true", "causal: true, lse: true"))
    return root


@pytest.mark.parametrize("name", ["back/03", "back/3", "back/03_tiny", "back/tiny"])
def test_rung_of_a_further_ladder_bears_its_name(two_ladders, name):
    rung = find(name, two_ladders)
    assert (rung.ladder, rung.number, rung.name) == ("back", "03", "back/03_tiny")
    assert (rung.address, rung.file_name, rung.root) == ("back/03", "back-03_tiny", two_ladders)
    assert catalog.address_of(rung.name) == rung.address
    assert rung != find("tiny", two_ladders)


@pytest.mark.parametrize("name", ["forward/07", "forward/7", "forward/07_tiny", "forward/tiny", "07", "07_tiny"])
def test_the_first_ladder_need_not_be_named(two_ladders, name):
    rung = find(name, two_ladders)
    assert rung is find("tiny", two_ladders)
    assert (rung.ladder, rung.name, rung.address, rung.file_name) == ("forward", "07_tiny", "07", "07_tiny")


def test_ladders_come_one_after_the_other(two_ladders):
    assert catalog.ladders(two_ladders) == ["forward", "back"]
    assert [rung.name for rung in versions(two_ladders)] == ["07_tiny"]
    assert [rung.name for rung in versions(two_ladders, "back")] == ["back/03_tiny", "back/07_masked"]
    chosen = {(): ["07"], ("forward",): ["07"], ("back",): ["back/03", "back/07"], ("07", "back/03"): ["07", "back/03"]}
    for names, addresses in chosen.items():
        assert [rung.address for rung in catalog.select(names, two_ladders)] == addresses


def test_a_rung_is_not_that_of_another_ladder(two_ladders):
    masked = Problem(head_dim=64, causal=True)
    with pytest.raises(ConfigError, match=r"no version 03; there are 07_tiny, those of back/"):
        find("03", two_ladders)
    with pytest.raises(ConfigError, match=r"no version back/99; there are back/03_tiny, back/07_masked"):
        find("back/99", two_ladders)
    with pytest.raises(ConfigError, match=r"no version forth/03; there are 07_tiny"):
        find("forth/03", two_ladders)
    assert nearest(find("07", two_ladders), masked) is None
    assert nearest(find("back/03", two_ladders), masked) == find("back/07", two_ladders)


def test_the_real_ladders_are_valid():
    for ladder in set(catalog.ladders()) - own.ladders().keys():
        assert all(rung.operation in operation_names() for rung in versions(ladder=ladder)), ladder


def test_kernels_of_different_operations_are_not_compared(tmp_path):
    rung = make_rung(tmp_path, yaml=VERSION_YAML + "operation: backward\n")
    with pytest.raises(UnsupportedProblemError, match="07_tiny computes the operation backward, not forward; no rung"):
        rung.config_for(Problem(head_dim=64))
    with pytest.raises(ConfigError, match=r"different operations \(backward, forward\): compare those of one"):
        catalog.one_operation(["forward", "backward", "forward"])


def test_what_would_work_is_a_finished_rung_before_a_draft():
    advice = find("24").alternative(Problem(head_dim=520))
    name = re.search(r"with head_dim=512 (\w+) would", advice)[1]
    assert not find(name).draft
