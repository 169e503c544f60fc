"""The references on the CPU: right on any problem they take, against the exact answer; refused clearly otherwise."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashladder.common import catalog, console, host
from flashladder.common.errors import ConfigError, DeviceError, UnsupportedProblemError
from flashladder.common.measure.references import Configured, device_for, load, missing, tiling
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.operations.forward import attention
from flashladder.common.problem.problem import Problem
from flashladder.common.records import records
from flashladder.tests.support import triton_process
from flashladder.tools.commands import run_version

NAMES = ("py_fa1", "py_fa2", "c", "triton")
ALGORITHMS = ("py_fa1", "py_fa2")


@pytest.fixture(autouse=True)
def results(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHLADDER_RESULTS", str(tmp_path))


def reference(name):
    found = catalog.find_implementation(name)
    if reason := missing(found):
        pytest.skip(reason)
    return found


def run(name, problem, **values):
    """Runs on the CPU, and requires the right output."""
    found = reference(name)
    config = found.config_for(problem, **values)
    found.check(problem, config)
    tensors = make_inputs(problem)
    prepared = Configured(found, config).prepare(problem, tensors)
    prepared()
    verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(f"{name} on {problem.name}")
    return prepared


@pytest.mark.parametrize("name", NAMES)
def test_without_the_log_sum_exp(name):
    run(name, Problem(seqlen_q=40, head_dim=16 if name != "triton" else 64, num_heads=2, lse=False))


@pytest.mark.parametrize("paged", [False, True])
def test_decode(paged):
    sizes = {"num_heads": 4, "num_heads_k": 2, "seqlen_q": 3, "seqlens_k": (0, 2, 50), "head_dim": 64, "causal": True}
    options = {"paged": paged, "page_size": 16 if paged else 64, "num_splits": 3}
    run("py_decode", Problem(operation="decode", **sizes, options=options), block_n=16)
    latent = {**sizes, "head_dim": 576, "head_dim_v": 512}
    run("py_mla", Problem(operation="mla", **latent, options=options), block_n=16)


@st.composite
def problems(draw, longest=300):
    heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Problem(
        batch=draw(st.integers(1, 2)),
        num_heads=heads_k * group,
        num_heads_k=heads_k,
        seqlen_q=draw(st.integers(1, longest)),
        seqlen_k=draw(st.integers(1, longest)),
        head_dim=draw(st.sampled_from([16, 32, 64, 128])),
        dtype=draw(st.sampled_from(["bf16", "fp16"])),
        causal=draw(st.booleans()),
        softmax_scale=draw(st.sampled_from([None, 0.5])),
        layout=draw(st.sampled_from(["bshd", "bhsd", "padded"])),
        seed=draw(st.integers(0, 99)),
    )


@given(problem=problems(longest=200), blocks=st.tuples(*[st.sampled_from([32, 48, 64, 128])] * 2))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_python_on_any_problem(name, problem, blocks):
    run(name, problem, block_m=blocks[0], block_n=blocks[1])


@given(problem=problems(longest=600), accumulate=st.sampled_from(["fp32", "fp64"]))
@settings(max_examples=40, deadline=None)
def test_c_on_any_problem(problem, accumulate):
    run("c", problem, accumulate=accumulate)


@given(problem=problems(longest=150))
@settings(max_examples=10, deadline=None)
def test_triton_on_any_problem(problem):
    run("triton", problem)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"),
    [(1, 1, True), (1, 1, False), (1, 200, True), (130, 1, True), (129, 65, True), (64, 128, False)],
)
def test_lengths_at_the_edges(name, seqlen_q, seqlen_k, causal):
    run(name, Problem(num_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, causal=causal))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [16, 32, 96, 128, 192, 256])
def test_head_dims(name, head_dim):
    problem = Problem(seqlen_q=70, head_dim=head_dim)
    if reference(name).takes(problem):
        run(name, problem)
    else:
        with pytest.raises(UnsupportedProblemError, match=f"{name} takes head_dim .*, not {head_dim}; of the refer"):
            reference(name).check(problem, reference(name).config())


def test_c_in_fp64_is_exact_to_the_last_digits():
    problem = Problem(num_heads=2, seqlen_q=333, seqlen_k=500, causal=True, head_dim=96)
    tensors = make_inputs(problem)
    o, lse = load(reference("c")).attention(tensors.q, tensors.k, tensors.v, causal=True, accumulate="fp64")
    exact, exact_lse = attention(problem, tensors.by_name, torch.float64)
    torch.testing.assert_close(o, exact, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-13, atol=1e-14)


def test_c_keeps_exponentials_of_far_scores_apart():
    q, k = torch.full((1, 1, 1, 16), 10.0), torch.zeros(1, 64, 1, 16)
    k[0, :, 0, 0] = torch.linspace(-20, 20, 64)
    v = torch.randn(1, 64, 1, 16)
    for accumulate, tolerance in (("fp32", 1e-5), ("fp64", 1e-13)):
        o, _ = load(reference("c")).attention(q, k, v, softmax_scale=1.0, accumulate=accumulate)
        scores = (q.double()[0, :, 0] @ k.double()[0, :, 0].T).softmax(-1)
        torch.testing.assert_close(o[0, :, 0].double(), scores @ v.double()[0, :, 0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads_k", "causal"), [(50, 37, 4, False), (37, 50, 2, True), (50, 20, 1, True)]
)
def test_gradients_are_autograds(name, seqlen_q, seqlen_k, heads_k, causal):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, seqlen_q, 4, 16), (2, seqlen_k, heads_k, 16), (2, seqlen_k, heads_k, 16)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    options = {"causal": causal, "softmax_scale": 0.3, "block_m": 16, "block_n": 32}
    o, _ = tiling.attention(load(reference(name)).algorithm, *inputs, **options)
    ours = torch.autograd.grad((o * weight).sum(), inputs)
    exact = textbook(*inputs, 0.3, causal)
    torch.testing.assert_close(o, exact, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(ours, torch.autograd.grad((exact * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def textbook(q, k, v, scale, causal):
    """Attention that torch differentiates; rows that see no key are 0."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = scale * q @ k.mT
    if causal:
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        hidden = keys > rows + k.shape[2] - q.shape[2]
        blind = hidden.all(-1)[:, None]
        scores = scores.masked_fill(hidden & ~blind, -torch.inf)
        return (scores.softmax(-1).masked_fill(blind, 0) @ v).transpose(1, 2)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def counted(name, backward=False):
    """The traffic of 8 tiles of 16 rows of Q and 4 of 32 keys, head_dim 16, in fp32."""
    hbm = tiling.Hbm()
    q, k, v = (torch.randn(1, 128, 1, 16, requires_grad=backward) for _ in range(3))
    o, _ = tiling.attention(load(reference(name)).algorithm, q, k, v, block_m=16, block_n=32, hbm=hbm)
    if backward:
        hbm.read.clear()
        hbm.written.clear()
        o.sum().backward()
    return hbm


def test_traffic_of_each_loop_order():
    matrix, row = 128 * 16 * 4, 128 * 4
    one, two = counted("py_fa1"), counted("py_fa2")
    assert dict(one.read) == {
        "K": matrix, "V": matrix, "Q": 4 * matrix, "O": 5 * matrix, "l": 4 * row, "m": 4 * row
    }  # fmt: skip
    assert dict(one.written) == {"O": 5 * matrix, "l": 4 * row, "m": 4 * row}
    assert dict(two.read) == {"Q": matrix, "K": 8 * matrix, "V": 8 * matrix}
    assert dict(two.written) == {"O": matrix, "lse": row}
    assert two.total == sum(two.read.values()) + sum(two.written.values())


def test_traffic_of_the_way_back():
    matrix, row = 128 * 16 * 4, 128 * 4
    one, two = counted("py_fa1", backward=True), counted("py_fa2", backward=True)
    assert one.read["O"] == 4 * matrix
    assert (two.read["O"], two.read["D"], two.written["D"]) == (matrix, 4 * row, row)
    for hbm in (one, two):
        assert (hbm.written["dQ"], hbm.written["dK"], hbm.written["dV"]) == (4 * matrix, matrix, matrix)


def test_causal_tiles_that_nobody_sees_do_not_travel():
    full, half = tiling.Hbm(), tiling.Hbm()
    q, k, v = (torch.randn(1, 128, 1, 16) for _ in range(3))
    for hbm, causal in ((full, False), (half, True)):
        tiling.attention(load(reference("py_fa2")).algorithm, q, k, v, causal=causal, block_m=16, block_n=16, hbm=hbm)
    assert half.read["K"] / full.read["K"] == (8 * 9 / 2) / 64


@pytest.fixture
def tool(capsys):
    def call(*arguments):
        code = console.run(run_version.main, run_version.parser(), [*arguments])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("name", NAMES)
def test_run_like_a_rung(tool, name):
    toolkit = load(reference(name)).toolkit()
    code, out, err = tool(name, "--device", "cpu", "--seqlen", "64", "--causal", "--rounds", "2")
    assert code == 0, err
    assert "PASS" in out
    assert "scaled_dot_product_attention" in out
    row = records.runs().read()[0].iloc[0]
    assert (row["version"], row["device"], row["toolkit"]) == (name, host.title(), toolkit)
    assert (row["passed"], row["baseline"], row["causal"]) == (True, "sdpa", True)
    assert row["ratio"] > 0


def test_traffic_is_shown(tool):
    _, out, _ = tool("py_fa1", "--device", "cpu", "--seqlen", "128", "--no-measure", "--no-log")
    assert "MiB: K 0.06, V 0.06, Q 0.12, O 0.38" in out
    assert "times Q, K, V and O" in out


def test_a_wrong_output_fails(tool, monkeypatch):
    module = load(reference("c"))
    right = module.attention
    monkeypatch.setattr(module, "attention", lambda *a, **k: tuple(2 * tensor for tensor in right(*a, **k)))
    code, out, err = tool("c", "--seqlen", "64", "--no-log")
    assert code == console.EXIT_ERROR
    assert "FAIL" in out
    assert "error: c with dtype=bf16,head_dim=128,accumulate=fp32 is wrong" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cute", "--device", "cpu"], "cute runs on gpu, not on cpu"),
        (["c", "--device", "gpu"], "c runs on cpu, not on gpu"),
        (["py_fa1", "--device", "emulator"], "py_fa1 runs on cpu, gpu, not on emulator"),
        (["02", "--device", "cpu"], "a rung is a CUDA kernel"),
        (["py_fa2", "--head-dim", "72"], "py_fa2 takes head_dim 16, 32, 64, 96, 128, 192, 256, not 72; no reference"),
        (["c", "--config", "accumulate=fp16"], "accumulate=fp16 is not one of fp32, fp64"),
        (["c", "--config", "block_m=64"], "c has no field block_m"),
        (["py_fa1", "--config", "block_n=20"], "block_n=20 breaks the rule"),
        (["c", "--device", "cpu", "--mode", "cold"], "--mode cold is for GPUs"),
        (["py_fa3"], "no version py_fa3; did you mean py_fa2?"),
    ],
)
def test_what_is_not_supported_is_refused(tool, arguments, message):
    code, out, err = tool(*arguments)
    assert code == console.EXIT_ERROR
    assert message in err
    assert "Traceback" not in out + err


def test_a_rung_names_the_references_where_no_rung_helps(tool, monkeypatch):
    monkeypatch.setattr("flashladder.common.catalog.catalogue.nearest", lambda *_: None)
    code, _, err = tool("02", "--device", "emulator", "--head-dim", "32")
    assert code == console.EXIT_ERROR
    assert "of the references c, py_fa1, py_fa2, triton take it" in err


def test_all_are_listed(tool):
    _, out, _ = tool("--list")
    for found in catalog.references():
        assert f" {found.name} " in out
    assert {*NAMES, "cute", "py_decode", "py_mla"} == {found.name for found in catalog.references()}


@pytest.fixture
def lacking(monkeypatch):
    """A machine with neither Triton nor CuTe."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("triton", "cutlass") else find(name))


def test_a_missing_package_is_named_with_its_install_line(tool, lacking):
    code, _, err = tool("cute")
    assert code == console.EXIT_ERROR
    assert "cute cannot run: cutlass is not installed: pip install nvidia-cutlass-dsl" in err
    code, _, err = tool("triton", "--device", "cpu")
    assert code == console.EXIT_ERROR
    assert "triton cannot run: triton is not installed: pip install triton" in err
    assert "triton is not installed: pip install triton" in tool("--list", "triton")[1]


def test_a_gpu_is_asked_for_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert device_for(catalog.find_implementation("py_fa1"), "auto") == "cpu"
    with pytest.raises(DeviceError):
        device_for(catalog.find_implementation("py_fa1"), "gpu")


COMPILE_TRITON = """
import torch
torch.cuda.is_available = lambda: True  # so that the kernel is compiled and not interpreted
from flashladder.common import catalog
from flashladder.common.measure import references
module = references.load(catalog.find_implementation("triton"))
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
kernel, tile = module.attention_forward, module.TILES[0]
constants = {"head_dim": 128, "causal": True, "operand": module.OPERANDS["bf16"], **tile.kwargs}
types = {**dict.fromkeys("qkvo", "*bf16"), "lse": "*fp32", "scale_log2": "fp32"}
types |= dict.fromkeys(constants, "constexpr")
names = kernel.arg_names
strided = [name for name in names if name[0] in "qkvo" and name[1:2] in ("", "_")]  # the tensors and their strides
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in strided}
source = ASTSource(
    kernel,
    signature={name: types.get(name, "i32") for name in names},
    constexprs={(names.index(name),): value for name, value in constants.items()},
    attrs=aligned,
)
options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


@pytest.mark.slow
def test_triton_becomes_tensor_core_code_without_a_gpu():
    reference("triton")
    ptx = triton_process.run("-c", COMPILE_TRITON, capture_output=True, text=True, check=True).stdout
    assert ".target sm_90a" in ptx
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx


YAML = """
title: Small
idea: None.
operation: forward
devices: [cpu]
supports: {dtype: [bf16], head_dim: [64]}
config: {}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices: [cpu]", "devices: [tpu]", "devices=tpu is not one of cpu, gpu"),
        ("devices: [cpu]", "", "the key devices is missing"),
        ("title", "instruction_set: ampere\ntitle", "unknown key instruction_set; .* config, defaults, .*devices"),
        ("title", "kernel: other.py\ntitle", "there is no kernel .*other.py"),
    ],
)
def test_bad_declaration_is_refused_with_its_path(tmp_path, old, new, message):
    folder = tmp_path / "references" / "small"
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text("")
    (folder / "version.yaml").write_text(YAML.replace(old, new))
    with pytest.raises(ConfigError, match=f"(?s)small/version.yaml: .*{message}"):
        catalog.references(tmp_path)
