import copy
import dataclasses
import pickle

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from flashladder.common.errors import ConfigError
from flashladder.common.problem import config as config_module
from flashladder.common.problem.config import FIELDS, RULES, GpuDescription, KernelConfig, gpu_names, load_gpu
from flashladder.common.problem.rules import Rule

PLAUSIBLE = {
    **{name: st.sampled_from(field.choices) for name, field in FIELDS.items() if field.choices},
    **{name: st.integers(1, 32).map(lambda n: 16 * n) for name in ("head_dim", "block_m", "block_n")},
    **{name: st.sampled_from([0, 2, 4, 8]) for name in ("q_fragments", "k_fragments", "v_fragments")},
    **{name: st.booleans() for name, field in FIELDS.items() if field.type is bool},
    "mods": st.sampled_from(["", "mask=k<=q", "t:int32[][];mask=b==1?k<q:t[q][k]!=0;score=min(max(s,t[q][k]),3)"]),
}


@st.composite
def configs(draw):
    names = draw(st.lists(st.sampled_from(list(FIELDS)), unique=True))
    values = {name: draw(PLAUSIBLE.get(name, st.integers(1, 8))) for name in names}
    assume(all(rule.holds(values) for rule in RULES))
    return KernelConfig.of(**values)


@given(configs())
def test_short_name_parses_back(config):
    parsed = KernelConfig.parse(config.name)
    assert parsed == config
    assert hash(parsed) == hash(config)
    assert parsed.fields == config.fields


@given(configs())
def test_config_survives_pickle_and_copy(config):
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_config_reads_as_attributes_and_never_changes():
    config = KernelConfig.of(dtype="bf16", block_m=64, double_buffer=True)
    assert (config.dtype, config.block_m, config.double_buffer) == ("bf16", 64, True)
    assert config.name == str(config) == "dtype=bf16,block_m=64,double_buffer=true"
    assert config.as_dict() == {"dtype": "bf16", "block_m": 64, "double_buffer": True}
    with pytest.raises(AttributeError, match="no field num_warps"):
        _ = config.num_warps
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_m = 128


@pytest.mark.parametrize(
    ("dtype", "include", "cpp_type"), [("bf16", "cuda_bf16.h", "__nv_bfloat16"), ("fp16", "cuda_fp16.h", "__half")]
)
def test_header_spells_every_field_for_cpp(dtype, include, cpp_type):
    header = KernelConfig.of(dtype=dtype, block_m=64, double_buffer=True, causal=False).header()
    assert header == (
        f"#pragma once\n#include <{include}>\n\nnamespace config {{\nusing dtype = {cpp_type};\n"
        "constexpr int block_m = 64;\nconstexpr bool double_buffer = true;\nconstexpr bool causal = false;\n}\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block_q=64", "unknown field block_q; did you mean block_n\\?$"),
        ("block_m", "'block_m' is not field=value"),
        ("block_m=64,block_m=128", "block_m is given twice"),
        ("block_m=big", "block_m='big' is not a whole number, 1 or more"),
        ("block_m=0", "block_m=0 is not a whole number, 1 or more"),
        ("block_m=-64", "block_m='-64' is not a whole number, 1 or more"),
        ("q_fragments=-1", "q_fragments='-1' is not a whole number, 0 or more"),
        ("causal=1", "causal='1' is not true or false"),
        ("dtype=fp32", "dtype=fp32 is not one of bf16, fp16"),
        ("head_dim=100", "head_dim=100 breaks the rule head_dim % 16 == 0"),
        ("block_m=64,num_warps=8", "block_m=64, num_warps=8 breaks the rule .*: each warp owns whole 16-row mma tiles"),
        ("num_warps=64", "num_warps=64 breaks the rule .*: a CTA has at most 1024 threads"),
        ("head_dim=128,q_fragments=1", "q_fragments=1 breaks the rule"),
        ("head_dim=128,k_fragments=6", "k_fragments=6 breaks the rule .*: fragments are loaded in pairs"),
        ("head_dim=128,k_fragments=32", "k_fragments=32 breaks the rule"),
        ("block_n=32,v_fragments=8", "block_n=32, v_fragments=8 breaks the rule"),
    ],
)
def test_bad_text_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=message):
        KernelConfig.parse(text)


def test_wrong_types_are_refused():
    with pytest.raises(ConfigError, match="block_m=True is not a whole number"):
        KernelConfig.of(block_m=True)
    with pytest.raises(ConfigError, match="causal=1 is not true or false"):
        KernelConfig.of(causal=1)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("block_m ==", "is not a Python expression"),
        ("__import__('os').system('true')", "contains Call"),
        ("block_m.real == 1", "contains Attribute"),
        ("[x for x in (1, 2)]", "contains ListComp"),
    ],
)
def test_rule_takes_only_arithmetic_and_logic(expression, message):
    with pytest.raises(ConfigError, match=message):
        Rule(expression, "").holds({"block_m": 64})


def test_rule_applies_when_all_its_fields_are_there():
    rule = Rule("block_m == 64 or q_fragments in (2, 4)", "because")
    assert rule.holds({"block_m": 128})
    assert rule.holds({"block_m": 128, "q_fragments": 4})
    assert not rule.holds({"block_m": 128, "q_fragments": 0})


def test_described_gpus():
    described = {name: (load_gpu(name).arch, load_gpu(name).num_sms, load_gpu(name).memory_gb) for name in gpu_names()}
    assert described == {
        "a100": ("sm_80", 108, 80),
        "a100-40": ("sm_80", 108, 40),
        "a100-pcie": ("sm_80", 108, 80),
        "a800": ("sm_80", 108, 80),
        "a6000": ("sm_86", 84, 48),
        "rtx3090": ("sm_86", 82, 24),
        "rtx3090ti": ("sm_86", 84, 24),
        "rtx4090": ("sm_89", 128, 24),
        "rtx4090d": ("sm_89", 114, 24),
        "rtx6000ada": ("sm_89", 142, 48),
        "l4": ("sm_89", 58, 24),
        "l40s": ("sm_89", 142, 48),
        "h100": ("sm_90a", 132, 80),
        "h100-nvl": ("sm_90a", 132, 94),
        "h100-pcie": ("sm_90a", 114, 80),
        "h800": ("sm_90a", 132, 80),
        "h20": ("sm_90a", 78, 96),
        "h200": ("sm_90a", 132, 141),
        "gh200": ("sm_90a", 132, 96),
        "b200": ("sm_100a", 148, 180),
        "b300": ("sm_103a", 148, 270),
        "rtx5090": ("sm_120a", 170, 32),
    }


# Of the bf16 tensor cores of an SM in a clock; the smaller chips do half of it on GeForce cards, and an H20 is cut.
FLOPS = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90a": 4096, "sm_100a": 8192, "sm_103a": 8192}


@pytest.mark.parametrize("name", gpu_names())
def test_gpu_figures_fit_together(name):
    gpu = load_gpu(name)
    assert gpu.shared_per_sm - gpu.shared_per_block == 1024, "the system keeps 1 KiB of every CTA"
    assert gpu.registers_per_sm == 65536
    flops = 512 if "GeForce" in gpu.title else 1024 if name == "h20" else FLOPS[gpu.arch]
    peak_mhz = gpu.dense_bf16_tflops * 1e6 / (gpu.num_sms * flops)
    assert 0.9 * gpu.boost_mhz < peak_mhz < 1.01 * gpu.boost_mhz
    assert gpu.sources
    assert gpu.names
    assert set(gpu.unconfirmed) <= {field.name for field in dataclasses.fields(gpu)}
    assert load_gpu(name.upper()) == gpu


def test_no_two_gpus_are_told_apart_by_nothing():
    cards = [
        (name, load_gpu(gpu).num_sms, load_gpu(gpu).memory_gb) for gpu in gpu_names() for name in load_gpu(gpu).names
    ]
    assert len(set(cards)) == len(cards)


def test_unknown_gpu_lists_the_known():
    with pytest.raises(
        ConfigError, match=r"no description of the GPU v100; did you mean h100\? There are a100, a100-40"
    ):
        load_gpu("v100")


def test_gpu_file_with_a_wrong_key_is_refused(tmp_path, monkeypatch):
    values = dataclasses.asdict(load_gpu("h100"))
    assert isinstance(load_gpu("h100"), GpuDescription)
    del values["name"], values["num_sms"]
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "mine.yaml").write_text(
        yaml.safe_dump({**values, "sms": 1, "sources": ["mine"], "names": [], "unconfirmed": []})
    )
    monkeypatch.setattr(config_module, "CONFIGS", tmp_path)
    with pytest.raises(ConfigError, match=r"mine.yaml: these keys are missing or unknown: num_sms, sms"):
        load_gpu("mine")
