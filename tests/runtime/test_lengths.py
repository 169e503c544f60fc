"""Winners for short keys and for long ones: which is chosen, and that both stand ready from a first call on."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashladder.common import catalog
from flashladder.common.api import attention, operator, options
from flashladder.common.catalog import winners
from flashladder.common.errors import BuildError, ConfigError, DeviceError, UnsupportedProblemError
from flashladder.common.problem.check import expect
from flashladder.common.problem.config import KernelConfig, load_gpu
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.records import received
from flashladder.common.runtime import ahead, fast_path, ready, target
from flashladder.tests.support import fake_cuda
from flashladder.tests.support.tiny_ladder import make_rung
from flashladder.tuner.adopt import export

LONG_FROM, LENGTHS = catalog.ladder_of("forward").long_from, catalog.ladder_of("forward").lengths
EVIDENCE = winners.of_gpu("h100")[0].evidence  # of one that was measured
RUNG = catalog.find("02")
ANY = "dtype=bf16,head_dim=128,causal=false"
SHORT, LONG = f"{ANY},length=short", f"{ANY},length=long"
BLOCK_N = {ANY: 64, SHORT: 32, LONG: 128}  # of each kind's winner
PROBLEMS = {SHORT: Problem(seqlen_q=4096, seqlen_k=1024), LONG: Problem(seqlen_q=64, seqlen_k=4096)}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """No winners, but those that a test saves."""
    monkeypatch.setattr(winners, "FOLDER", tmp_path / "tuned")
    return tmp_path / "tuned"


def save(*kinds, home=None, **values):
    for kind in kinds:
        winners.save("h100", RUNG.name, kind, values or {"block_n": BLOCK_N[kind]}, {}, home)


def found(kind):
    """The block_n of the winner for a problem of a kind."""
    config = winners.config(RUNG, "h100", PROBLEMS[kind])
    return config and config.block_n


def test_a_problem_is_of_a_class_by_its_keys():
    for seqlen_k, kind in ((1, SHORT), (LONG_FROM - 1, SHORT), (LONG_FROM, LONG), (10**6, LONG)):
        assert winners.name_of(Problem(seqlen_q=LONG_FROM, seqlen_k=seqlen_k)) == kind
    packed = Problem(operation="packed", head_dim=128, seqlens_q=(5, 9), seqlens_k=(3, LONG_FROM))
    assert winners.name_of(packed) == LONG, "by its longest sequence"
    assert [winners.name_of(Problem(seqlen_q=64, seqlen_k=keys)) for keys in LENGTHS.values()] == [SHORT, LONG]


@pytest.mark.parametrize(
    ("there", "short", "long"),
    [
        ((), None, None),
        ((ANY,), ANY, ANY),
        ((SHORT,), SHORT, SHORT),
        ((LONG,), LONG, LONG),
        ((ANY, SHORT), SHORT, ANY),
        ((ANY, LONG), ANY, LONG),
        ((SHORT, LONG), SHORT, LONG),
        ((ANY, SHORT, LONG), SHORT, LONG),
    ],
)
def test_the_winner_of_the_class_then_that_of_any_length_then_the_others(there, short, long):
    save(*there)
    assert (found(SHORT), found(LONG)) == (BLOCK_N.get(short), BLOCK_N.get(long))


def test_one_that_the_rung_has_no_more_is_passed_over():
    save(SHORT, block_n=999 * 16)
    save(ANY)
    assert found(SHORT) == BLOCK_N[ANY]
    save(LONG)
    save(ANY, block_n=999 * 16)
    assert found(SHORT) == BLOCK_N[LONG]


def test_what_a_program_adopted_goes_first_whatever_its_length(monkeypatch, tmp_path):
    save(SHORT)
    adopted = tmp_path / "adopted"
    adopted.mkdir()
    save(LONG, home=adopted)
    assert found(SHORT) == BLOCK_N[SHORT]
    monkeypatch.setenv("FLASHLADDER_ADOPTED", str(adopted))
    assert found(SHORT) == found(LONG) == BLOCK_N[LONG]


def test_a_class_that_there_is_not_is_damage(folder):
    save(LONG)
    path = folder / "h100.yaml"
    path.write_text(path.read_text().replace("length=long", "length=medium"))
    with pytest.raises(ConfigError, match="the winner of 02_swizzling is damaged: length=medium is not one of short, "):
        found(LONG)


def test_winners_of_before_there_were_classes_stand(monkeypatch):
    """As they are in this repository: each is for any length."""
    monkeypatch.undo()
    for winner in winners.every():
        version, values = catalog.find(winner.version), dict(pair.split("=") for pair in winner.kind.split(","))
        if "length" not in values:
            kind = {"dtype": values["dtype"], "head_dim": int(values["head_dim"]), "causal": values["causal"] == "true"}
            for seqlen_k in LENGTHS.values():
                problem = Problem(seqlen_q=4096, seqlen_k=seqlen_k, lse=True, **kind)
                assert winner.kind in winners.names_for(problem)
                assert winners.choose(version, problem, [winner]), winner


KINDS = st.builds(Problem, seqlen_q=st.just(64), seqlen_k=st.sampled_from([1, 2047, 2048, 9999]), causal=st.booleans())


@given(KINDS, st.booleans())
def test_a_problem_of_the_other_class_differs_in_its_keys_alone(problem, packed):
    if packed:
        problem = Problem(operation="packed", seqlens_q=(3, 5), seqlens_k=(2, problem.seqlen_k))
    own, other = winners.of_each_length(problem)
    assert own is problem
    assert {winners.name_of(own), winners.name_of(other)} == set(winners.names_for(problem)) - {
        winners.names_for(problem)[1]
    }
    changed = {"seqlen_k": own.seqlen_k, "seqlens_q": own.seqlens_q, "seqlens_k": own.seqlens_k}
    assert dataclasses.replace(other, **changed) == own


def test_a_winner_that_was_found_with_another_class_is_named(folder):
    evidence = {"problems": [PROBLEMS[LONG].name], "times_us": [100.0], "baseline_us": [110.0], "ratio": "1.1 [1, 1.2]"}
    for kind, is_wrong in ((SHORT, True), (ANY, False), (LONG, False)):
        (folder / "h100.yaml").unlink(missing_ok=True)
        winners.save("h100", RUNG.name, kind, {"block_n": 32}, EVIDENCE | evidence)
        faults = received.faults(folder / "h100.yaml")
        assert any("which is of another kind" in fault for fault in faults) == is_wrong


@pytest.mark.parametrize(("head_dim", "stands"), [(64, True), (128, False)])
def test_a_winner_stands_where_it_fits_its_head_dim(folder, head_dim, stands):
    kind = f"dtype=bf16,head_dim={head_dim},causal=false,length=long"
    winners.save("h200", "38_next_q", kind, {"block_m": 192, "block_n": 128, "num_stages": 3, "q_stages": 2}, {})
    (winner,) = winners.of_gpu("h200")
    faults = list(received._of_winner(dataclasses.replace(winner, evidence=EVIDENCE), None))
    assert any("shared memory" in fault for fault in faults) != stands


def test_a_wheel_has_the_kernels_of_both(monkeypatch):
    kinds_of_wheels = [kind for kind in ahead.kinds() if kind.operation == "forward"]
    monkeypatch.setattr(ahead, "kinds", lambda: kinds_of_wheels)
    usual = ahead.requests("9.0a")
    kinds = [f"dtype=bf16,head_dim=64,causal=true,length={length}" for length in LENGTHS]
    for kind, num_stages in zip(kinds, (6, 4), strict=True):
        winners.save("h200", "49_every_width", kind, {"num_stages": num_stages}, {})
    made = ahead.requests("9.0a")
    assert {each.config.num_stages for each in made if each not in usual} == {4}
    assert set(usual) < set(made)


def test_an_export_has_the_kernels_of_both(tmp_path):
    """Also of a length that the program did not ask for: attention makes both ready."""
    (tmp_path / "adopted").mkdir()
    save(SHORT, LONG, home=tmp_path / "adopted")
    for problem in PROBLEMS.values():
        made = export.kernels(tmp_path / "adopted", RUNG.name, "sm_90a", load_gpu("h100"), [problem])
        assert sorted(each.config.block_n for each in made) == [32, 128]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_rung(tmp_path_factory.mktemp("ladder"))


@pytest.fixture(params=["Python", "C++"])
def driver(request, monkeypatch, tiny):
    """CPU tensors are taken for ones on a GPU, on which attention launches a tiny rung; with both ways of a call."""
    made = fake_cuda.for_attention(monkeypatch)
    monkeypatch.setattr(fast_path, "extension", fast_path.made() if request.param == "C++" else None)
    fake_cuda.launch_only(monkeypatch, tiny)
    return made


def save_winners(tiny, **block_m):
    for length, value in block_m.items():
        kind = f"dtype=bf16,head_dim=64,causal=false,length={length}"
        winners.save("h100", tiny.name, kind, {"block_m": value}, {})


def attend(seqlen_k):
    q, k = (torch.zeros(1, seqlen, 2, 64, dtype=torch.bfloat16) for seqlen in (256, seqlen_k))
    return attention(q, k, k, return_lse=True)


def blocks(driver):
    """The rows of a tile, of each launch."""
    return [256 // launch.shape[0] for launch in driver.launches]


@pytest.mark.parametrize("first", [LONG_FROM - 3, LONG_FROM + 3])
def test_nothing_is_made_ready_amid_generation(driver, tiny, monkeypatch, first):
    """Not even where it crosses from short keys to long ones."""
    save_winners(tiny, short=128, long=64)
    attend(first)
    for name in ("choice", "target", "build_one", "Call"):
        monkeypatch.setattr(ready, name, None)  # not even asked
    loads = driver.loads
    driver.launches.clear()
    lengths = [*range(LONG_FROM - 3, LONG_FROM + 3), 1, 5 * LONG_FROM, 1]
    for seqlen_k in lengths:
        attend(seqlen_k)
    assert blocks(driver) == [64 if seqlen_k >= LONG_FROM else 128 for seqlen_k in lengths]
    assert loads == driver.loads == 2


def test_a_graph_may_capture_what_the_first_call_was_not_of(driver, tiny, monkeypatch):
    save_winners(tiny, short=128, long=64)
    attend(100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attend(LONG_FROM)
    assert blocks(driver) == [128, 64]
    fake_cuda.forget_kernels(monkeypatch)
    with pytest.raises(DeviceError, match="which a CUDA graph cannot capture"):
        attend(100)


@pytest.mark.parametrize("there", [{}, {"short": 128}, {"long": 128}, {"short": 128, "long": 128}])
def test_one_kernel_where_both_are_the_same(driver, tiny, there):
    save_winners(tiny, **there)
    for seqlen_k in (LONG_FROM - 1, LONG_FROM):
        attend(seqlen_k)
    (found,) = set(ready.by_kind.values())
    assert len(ready.by_kind) == 2
    assert driver.loads == 1
    assert blocks(driver) == [128 if there else 64] * 2
    assert found.artifact.config.block_m == (128 if there else 64)


def test_where_one_cannot_be_built_neither_is_ready(driver, tiny, monkeypatch):
    """So a first call tells it, not a later one."""
    save_winners(tiny, short=128, long=64)
    build = ready.build_one

    def unable(rung, config, arch):
        if config.block_m == 64:
            raise BuildError("ptxas fails")
        return build(rung, config, arch)

    monkeypatch.setattr(ready, "build_one", unable)
    with pytest.raises(BuildError, match="ptxas fails"):
        attend(100)
    assert not ready.by_kind
    monkeypatch.setattr(ready, "build_one", build)
    attend(100)
    assert len(ready.by_kind) == 2


def test_keys_without_rows_or_heads_are_refused_as_before(driver, tiny):
    attend(100)
    q = torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
    for k in (q[0], q[0, 0, 0]):
        with pytest.raises(UnsupportedProblemError, match=r"k has shape"):
            attention(q, k, k)


def test_packed_sequences_are_as_long_as_the_longest(monkeypatch):
    asked = []
    fake_cuda.forget_kernels(monkeypatch)
    monkeypatch.setattr(ready, "_made", lambda rung, config, *_: asked.append(config) or config.name)
    monkeypatch.setattr(target, "resolve", lambda *_: target.Target(True, "sm_90a", load_gpu("h100")))
    for length, block_n in (("short", 64), ("long", 128)):
        kind = f"dtype=bf16,head_dim=64,causal=true,length={length}"
        winners.save("h100", "49_every_width", kind, {"block_m": 128, "block_n": block_n, "num_stages": 2}, {})
    q = torch.zeros(1, 9999, 2, 64, dtype=torch.bfloat16)
    operator.make_ready(q, *[q[:, :100]] * 2, (None, None), 0.0, packed=True, sinks=False)
    assert {config.block_n for config in asked} == {64, 128}
    assert all(config.packed for config in asked)
    for longest, block_n in ((LONG_FROM - 1, 64), (LONG_FROM, 128)):
        sizes = {"operation": "packed", "batch": 1, "total_q": 9999, "total_k": 9999, "seqlen_k": longest}
        found = ready.ready_for(options.problem_of(q, q, causal=True, lse=False, **sizes), q.device)
        assert KernelConfig.parse(found).block_n == block_n
    assert len(asked) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "field", "values"), [("24", "blocks_ahead", (2, 3)), ("38", "q_stages", (2, 1))])
def test_a_gpu_crosses_the_boundary(version, field, values, monkeypatch):
    """Answers are right on both sides, by kernels of their own, and a graph replays what a first call was not of."""
    here, rung = target.resolve("gpu", None), catalog.find(version)
    if not rung.runs_on(here.arch):
        pytest.skip(f"{rung.name} has no instructions for this GPU")
    for length, value in zip(LENGTHS, values, strict=True):
        kind = f"dtype=bf16,head_dim=64,causal=true,length={length}"
        winners.save(here.gpu.name, rung.name, kind, {field: value}, {})
    fake_cuda.forget_kernels(monkeypatch)
    fast_path.load()
    assert fast_path.extension, fast_path.missing
    extension, out = fast_path.extension, {}
    for seqlen_k in (LONG_FROM - 1, LONG_FROM, LONG_FROM + 1, LONG_FROM - 1):
        problem = Problem(seqlen_q=100, seqlen_k=seqlen_k, num_heads=4, head_dim=64, causal=True)
        tensors = make_inputs(problem, "cuda")
        for way in (extension, None):
            monkeypatch.setattr(fast_path, "extension", way)
            out[way] = attention(tensors.q, tensors.k, tensors.v, causal=True, version=version)
        assert torch.equal(out[extension], out[None])
        expected = expect(problem, tensors)
        assert (out[None] - expected.exact["o"]).abs().max() <= expected.tolerances["o"]
    assert len({each.artifact.code for each in ready.by_kind.values()}) == 2
    fake_cuda.forget_kernels(monkeypatch)
    attention(tensors.q, tensors.k[:, :50], tensors.v[:, :50], causal=True, version=version)
    o, graph = torch.empty_like(tensors.q), torch.cuda.CUDAGraph()
    tensors = make_inputs(dataclasses.replace(problem, seqlen_k=LONG_FROM), "cuda")
    with torch.cuda.graph(graph):
        attention(tensors.q, tensors.k, tensors.v, causal=True, version=version, out=o)
    graph.replay()
    assert torch.equal(o, attention(tensors.q, tensors.k, tensors.v, causal=True, version=version))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"38_next_q:\n  5: {config: block_m=128}\n", "is damaged: it should map rungs to their winners"),
        (b"38:\n  kind: {config: block_m=128}\n", "is damaged: it should map rungs to their winners"),
        (b"02_swizzling:\n  kind: {config: 5}\n", "the winner of 02_swizzling is damaged: config is 5, and should be"),
        (b"02_swizzling:\n  kind: {config: {block_m: 128}}\n", "is damaged: config is {'block_m': 128}, and should be"),
        (b"\xff\xfe\x00", "is damaged: .* can't decode"),
    ],
)
def test_a_damaged_file_is_named(folder, content, message):
    folder.mkdir()
    (folder / "h100.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        winners.of_gpu("h100")


def test_a_file_that_is_a_folder_is_named(folder):
    (folder / "h100.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        winners.of_gpu("h100")
