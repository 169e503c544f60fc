"""The ladder for MLA on the emulator, under the race detector; and why its cache is enough."""

import shutil

import pytest
import torch

from flashladder.common import catalog, own
from flashladder.common.compiler import build_one, translate
from flashladder.common.errors import BuildError, ConfigError, EmulatorError, UnsupportedProblemError
from flashladder.common.paths import VERSIONS
from flashladder.common.problem import decode_sizes as sizes
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.support.rung_table import mostly_slow
from flashladder.versions.references.py_mla.layer import LatentAttention, latent_attention

NAME = "mla"
ARCH = {"ampere": "sm_80", "hopper": "sm_90a"}
LENGTHS = (0, 1, 70, 130)
TELLING = {  # families of inputs, some in each dtype
    "bf16": "normal_10 outlier_channels rising_steeply falling_steeply lone_top plateau_rows jump_rows tiny_scale "
    "huge_scores huge_values",
    "fp16": "sinks equal_keys maximum_in_turn jump_in_turn climbing plateau_below common_scores huge_scale "
    "largest_values",
}


def problem(lengths=LENGTHS, options=(), **values):
    usual = {"num_heads": 16, "head_dim": 576, "head_dim_v": 512, "num_heads_k": 1, "seqlen_q": 1}
    return Problem(operation=NAME, seqlens_k=lengths, options=options, **(usual | values))


def emulated(version, task, make=translate, **options):
    """Requires a right output without a race; returns the tensors."""
    tensors = make_inputs(task)
    module = make(version, version.config_for(task), ARCH[version.instruction_set])
    on_emulator(module, task, tensors, **options)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(version.name)
    return tensors


RUNGS = [rung for rung in catalog.versions(ladder=NAME) if rung.takes(problem())]  # rows of 16 bits, that is
# The others copy pages and part sequences as the rung below does, and differ in how warps share products.
OWN_COPIES = [rung for rung in RUNGS if rung.number not in ("01", "04")]


def name_of(value):
    return getattr(value, "name", None)


@pytest.fixture(params=RUNGS, ids=name_of)
def version(request):
    return request.param


@pytest.mark.parametrize("version", mostly_slow(RUNGS))
def test_any_lengths(version):
    """NaN beyond each length, in pages of no sequence and in the guards are never seen."""
    tensors = emulated(version, problem(), make=build_one)
    assert (tensors.o[0] == 0).all()
    assert (tensors.lse[0] == torch.inf).all()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"num_splits": 3}, {"seqlen_q": 2, "causal": True}),
        ({"page_size": 24}, {"num_heads": 17}),
        ({"page_size": 16, "num_splits": 1}, {"num_heads": 70}),
        ({"page_size": 1, "num_splits": 1}, {}),
        ({"paged": False}, {"layout": "padded", "num_heads": 8, "num_heads_k": 2, "seqlen_q": 3, "causal": True}),
    ],
)
@pytest.mark.parametrize("version", OWN_COPIES, ids=name_of)
@pytest.mark.slow
def test_pages_parts_and_heads(version, options, sizes):
    task = problem((1, 130), options, dtype="fp16", **sizes)
    if version.takes(task):
        emulated(version, task)
    else:
        with pytest.raises(UnsupportedProblemError, match=r"takes (page_size 8, 16, .*, not (1|24)|num_splits 0)"):
            version.config_for(task)


@pytest.mark.parametrize("rung", ["mla/03", "mla/04", "mla/05"])
@pytest.mark.parametrize("keys", [64, 128, 320])
@pytest.mark.slow
def test_whole_blocks_even_and_odd(rung, keys):
    """More blocks than the ring has stages, and none with rows to clear."""
    emulated(catalog.find(rung), problem((keys,), {"num_splits": 1}))


WIDTHS = ((512, 512), (160, 128))  # of K and V, beside 576 and 512


@pytest.mark.parametrize(("head_dim", "head_dim_v"), WIDTHS)
@pytest.mark.parametrize("rung", ["mla/00", "mla/02", "mla/05", "mla/06", "mla/07", "mla/08"])
@pytest.mark.slow
def test_latents_of_other_widths(rung, head_dim, head_dim_v):
    """More blocks than any ring has stages."""
    found, task = catalog.find(rung), problem((3, 460), head_dim=head_dim, head_dim_v=head_dim_v)
    if head_dim in found.supports.head_dim:
        emulated(found, task, make=build_one)
    else:
        assert rung == "mla/06"
    with pytest.raises(ConfigError, match="V is as wide as latents are, 512 or 128"):
        found.config(head_dim=160, head_dim_v=512)


@pytest.mark.parametrize(
    ("lengths", "options", "sizes"),
    [
        (LENGTHS, {"fp8_rows": True}, {}),
        (
            (2, 260),
            {"fp8_rows": True, "num_splits": 2, "page_size": 1},
            {"seqlen_q": 3, "num_heads": 24, "causal": True},
        ),
        ((130,), {"fp8_rows": True, "paged": False}, {"layout": "padded", "num_heads": 8, "num_heads_k": 2}),
        (LENGTHS, {"sparse": True}, {"dtype": "fp16", "num_heads": 70}),
        ((500,), {"sparse": True, "fp8_rows": True}, {"num_heads": 128}),
        ((200,), {"sparse": True, "page_size": 24}, {"head_dim": 160, "head_dim_v": 128, "num_heads": 8}),
    ],
)
@pytest.mark.parametrize("rung", ["mla/07", "mla/08"])
@pytest.mark.slow
def test_rows_that_a_warpgroup_reads(rung, lengths, options, sizes):
    """NaN where no key is, in rows of 656 bytes too; a list's end may be followed by anything."""
    emulated(catalog.find(rung), problem(lengths, options, **sizes), make=build_one)


@pytest.mark.parametrize("options", [{"fp8_rows": True}, {"fp8_rows": True, "sparse": True}, {"sparse": True}])
@pytest.mark.slow
def test_one_producer_copies_all_rows(options):
    """Without a deadlock: what it waits for is never multiplied with beside a block that it has yet to fill."""
    version, task = catalog.find("mla/08"), problem((330,), {"num_splits": 1} | options)
    asked = dict(version.config_for(task).items) | {"num_producers": 1, "prefetch": False}
    tensors = make_inputs(task)
    on_emulator(build_one(version, version.config(**asked), "sm_90a"), task, tensors)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(version.name)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.slow
def test_few_heads_are_not_padded(heads, rows):
    """The rows of a tile are heads and rows of Q: as many tiles as that takes, and no copy of Q in between."""
    task = problem((40,), num_heads=heads, seqlen_q=rows, causal=True)
    assert task.asked.row_tiles(task, 64) == -(-heads * rows // 64)
    emulated(catalog.find("mla/05"), task, race=False)


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"fp8_rows": True}, {"dtype": "fp16"}, "fp8_rows=true takes head_dim=576, head_dim_v=512 and dtype=bf16, not"),
        (
            {"sparse": True},
            {"causal": True},
            "sparse=true takes paged=true, causal=false, num_heads_k=1 and seqlen_q=1",
        ),
        ({"sparse": True}, {"seqlen_q": 2}, "each row has its own list"),
    ],
)
def test_rows_and_lists_that_there_are_not(options, sizes, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        problem((5,), options, **sizes)


def test_one_part_a_sequence_is_stored_without_partial_results():
    """Beside sequences of more parts, and of no key."""
    tensors = emulated(catalog.find("mla/05"), problem((0, 40, 500), num_heads=16))
    assert (tensors.lse[0] == torch.inf).all()


def test_parts_are_one_wave(monkeypatch):
    """By the shares of 4 CTAs these are 3 and 2 parts: they grow until there are 4 at most."""
    monkeypatch.setattr(sizes, "TARGET_CTAS", 4)
    emulated(catalog.find("mla/05"), problem((320, 192)))


@pytest.mark.slow
def test_bits_do_not_depend_on_who_is_late(version):
    asked = problem((130,), {"num_splits": 2})
    task = asked if version.takes(asked) else problem((130,))  # the parts of a cluster
    first, *others = (emulated(version, task, race=False, lagging=lagging).o for lagging in ((), (0,), (1, 3)))
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize(("dtype", "family"), [(dtype, name) for dtype in TELLING for name in TELLING[dtype].split()])
@pytest.mark.parametrize("rung", ["mla/04", "mla/05", "mla/06"])
@pytest.mark.slow
def test_other_inputs(rung, dtype, family):
    """Of several blocks in each part, the two of rungs that are told how many, or those of a cluster."""
    asked = problem((300,), {} if rung == "mla/06" else {"num_splits": 2}, dtype=dtype, family=family)
    emulated(catalog.find(rung), asked, race=False)


def test_scores_are_designed_apart_from_v():
    """What V's columns hold weighs nothing, whatever the family."""
    tensors = make_inputs(problem((300,), {"paged": False}, family="plateau_4"))
    q, cache = tensors.q[0, 0].double(), tensors.k_cache[0, :, 0].double()
    scores = q @ cache.mT * 576**-0.5
    assert scores[:, -64:].abs().max() == 0
    assert (scores[:, :-64] - 4.5).abs().max() < 0.031
    assert cache[:, :512].min() > 0.7
    assert cache[:, :512].std(0).min() > 0.1


def test_designs_need_columns_of_their_own():
    with pytest.raises(
        UnsupportedProblemError, match="its scores take 64 columns that are K's alone, more than head_dim=576 has"
    ):
        problem(head_dim_v=576, family="sinks")


def test_the_cache_is_one_tensor():
    tensors = make_inputs(problem((5,)))
    assert tensors.v_cache.data_ptr() == tensors.k_cache.data_ptr()
    assert tensors.v_cache.shape[-1] == 512
    assert tensors.v_cache.stride() == tensors.k_cache.stride()


def test_what_is_moved_is_the_cache_once():
    task = problem((100, 28), num_heads=2, seqlen_q=3)
    assert task.asked.bytes_moved(task) == 2 * (128 * 576 + 2 * 3 * 2 * (576 + 512))


@pytest.mark.parametrize(
    ("batch", "heads", "splits", "target"),
    [(1, 16, 122, 132), (1, 128, 63, 66), (8, 128, 8, 66), (64, 128, 1, 64), (128, 16, 1, 128), (128, 128, 1, 66)],
)
def test_parts_are_of_64_rows(batch, heads, splits, target):
    """One CTA for each SM; and one a sequence, where these are nearly as many."""
    task = problem((4096 if batch > 8 else 32768,) * batch, num_heads=heads)
    assert task.asked.argument(task, "num_splits") == splits
    assert task.asked.argument(task, "target_parts") == target


def test_v_is_no_wider_than_k():
    with pytest.raises(UnsupportedProblemError, match="V is the first columns of K, which has head_dim=64"):
        problem(head_dim=64, head_dim_v=96)


@pytest.mark.parametrize("line", ["wait_for(s);", "wait_for(o);"])
def test_products_that_are_not_waited_for_are_not_built(tmp_path, monkeypatch, line):
    """ptxas runs them one by one. What the emulator says of them, and of each barrier and fence of rungs 00 to 02, is
    in test_decode_mutations.py."""
    found, folder = catalog.find("mla/02"), tmp_path / "mutants" / "00_mutant"
    code = found.kernel.read_text()
    assert code.count(line) == 1
    folder.mkdir(parents=True)
    (folder / "kernel.cu").write_text(code.replace(line, "//").replace('"latents', '"mla/cuda/latents'))
    (folder / "version.yaml").write_text(f"operation: {NAME}\n{(found.directory / 'version.yaml').read_text()}")
    monkeypatch.setenv("FLASHLADDER_VERSIONS", str(folder.parent))
    with pytest.raises(BuildError, match="matrix products"):
        emulated(catalog.find("mutants/00"), problem((130,), {"num_splits": 1}), make=build_one)


@pytest.mark.parametrize(
    ("rung", "file", "old", "message"),
    [
        ("mla/03", "kernel.cu", "ring.wait(at, panel);", "a copy to it is in flight"),
        (
            "mla/03",
            "kernel.cu",
            "named_barrier_sync(1, consumers);  // the maxima",
            "nobody has written|race on shared",
        ),
        ("mla/03", "kernel.cu", "named_barrier_sync(1, consumers);  // P is", "race on shared memory"),
        ("mla/03", "kernel.cu", "fence_proxy_async();  // before wgmma reads zeros", "fence.proxy.async"),
        ("mla/03", "kernel.cu", "ring.release(at, group);", "deadlock"),
        ("mla/03", "latent_ring.cuh", "empty[at.stage][panel / half].wait(at.parity);", "more arrivals at once"),
        ("mla/04", "kernel.cu", "ring.wait(at, panel);", "a copy to it is in flight"),
        ("mla/04", "kernel.cu", "__syncwarp();  // every lane", "no __syncwarp lies between"),
        (
            "mla/04",
            "kernel.cu",
            "named_barrier_sync(has_passed + (group ^ 1), consumers);",
            "race on|nobody has written",
        ),
        ("mla/04", "kernel.cu", "named_barrier_sync(has_cleared + group, warpgroup_threads);", "race on shared memory"),
        ("mla/04", "latent_ring.cuh", "empty[at.stage][panel / half].wait(at.parity);", "more arrivals at once"),
        ("mla/05", "latent_scores.cuh", "ring.wait(at, panel);", "a copy to it is in flight"),
        (
            "mla/05",
            "kernel.cu",
            "named_barrier_sync(has_passed + (group ^ 1), consumers);",
            "race on|nobody has written",
        ),
        ("mla/05", "kernel.cu", "wait_for_dependency();  // the parts", "before which combine may begin"),
        ("mla/07", "kernel.cu", "ring.wait(at);", "race on|nobody has written"),
        (
            "mla/07",
            "kernel.cu",
            "named_barrier_sync(has_passed + (group ^ 1), consumers);",
            "race on|nobody has written",
        ),
        ("mla/07", "kernel.cu", "__syncwarp();  // every lane", "no __syncwarp lies between"),
        ("mla/07", "kernel.cu", "__syncthreads();  // the barriers", "race on|nobody has written|barrier"),
        ("mla/07", "kernel.cu", "ring.release(at);", "deadlock"),
        ("mla/07", "sliced_combine.cuh", "wait_for_dependency();  // the parts", "before which combine may begin"),
        (
            "mla/07",
            "row_reader.cuh",
            "ring.empty[at.stage].wait(at.parity);",
            "nobody has yet seen the end of the last",
        ),
        ("mla/07", "row_reader.cuh", "fence_proxy_async();  // before wgmma", "fence.proxy.async"),
        ("mla/07", "row_reader.cuh", "__syncwarp();         // every lane", "together|race on"),
        ("mla/08", "kernel.cu", "ring.wait(at);", "race on|nobody has written|in flight"),
        ("mla/08", "kernel.cu", "ring.release(at);", "deadlock"),
        (
            "mla/08",
            "row_copier.cuh",
            "ring.empty[to.stage].wait(to.parity);",
            "nobody has yet seen the end of the last|race on",
        ),
        ("mla/08", "row_copier.cuh", "cp_async_wait<ahead>();", "in flight"),
        ("mla/08", "row_copier.cuh", "fence_proxy_async();  // before wgmma", "fence.proxy.async"),
        ("mla/08", "row_copier.cuh", "__syncwarp();         // every lane", "together|race on"),
        ("mla/09", "kernel.cu", "ring.full[at.stage].wait(at.parity);", "in flight|nobody has written"),
        ("mla/09", "kernel.cu", "warp.wait_for_team(has_scores);", "race on|nobody has written"),
        ("mla/09", "kernel.cu", "warp.wait_for_team(has_p);", "race on|nobody has written"),
        ("mla/09", "kernel.cu", "__syncthreads();  // the barriers", "race on|nobody has written|barrier"),
        ("mla/09", "kernel.cu", "fence_mbarrier_init();", "mbarrier_init"),
        ("mla/09", "kernel.cu", "named_barrier_sync(all_done, team_threads);  // no block", "race on|has written"),
        ("mla/09", "kernel.cu", "named_barrier_sync(all_done, team_threads);  // O of", "race on|nobody has written"),
        ("mla/09", "raw_rows.cuh", "empty[to.stage].wait(to.parity);", "race on|in flight"),
        ("mla/09", "raw_rows.cuh", "fence_proxy_async();  // before copies come where it", "fence.proxy.async"),
        ("mla/09", "raw_rows.cuh", "empty[at.stage].arrive_as_warp();", "deadlock"),
        ("mla/09", "raw_rows.cuh", "fence_proxy_async();  // before copies come where zeros", "fence.proxy.async"),
        ("mla/09", "raw_rows.cuh", "__syncwarp();         // zeros are there", "race on|together"),
        ("mla/09", "raw_rows.cuh", "full[stage].arrive_expecting(__popc(is) * row_bytes);", "deadlock"),
        ("mla/06", "kernel.cu", "cluster_sync();  // the parts are there", "race on|cluster|deadlock"),
    ],
)
@pytest.mark.slow
def test_what_passes_between_warps_is_waited_for(tmp_path, monkeypatch, rung, file, old, message):
    task = problem((200,), {"num_splits": 2 if rung == "mla/05" else 1})
    if rung == "mla/09":
        task = problem((900,), {"num_splits": 1, "fp8_rows": True, "sparse": True})
    if rung in ("mla/07", "mla/08"):
        task = problem((400,), {"num_splits": 2, "fp8_rows": True, "sparse": True})
    if rung == "mla/06":
        task = problem((10, 10))
    found, folder = catalog.find(rung), tmp_path / "mutants"
    shutil.copytree(VERSIONS / NAME / "cuda", folder / "cuda")
    shutil.copytree(found.directory, folder / "00_mutant")
    path = next(folder.glob(f"*/{file}"))
    code = path.read_text()
    assert code.count(old) == 1
    path.write_text(code.replace(old, ";" + old.partition(";")[2]))
    yaml = folder / "00_mutant" / "version.yaml"
    yaml.write_text(f"operation: {NAME}\n{yaml.read_text()}")
    monkeypatch.setenv(own.VARIABLE, str(folder))
    with pytest.raises(EmulatorError, match=message):
        emulated(catalog.find("mutants/00"), task)


def test_absorbed_is_the_same_as_expanded():
    """fp64: the order of the products is all that differs."""
    torch.manual_seed(0)
    layer = LatentAttention(num_heads=4, head_dim=16, latent=32, rotated=8).double()
    q, q_rotated, cache = (torch.randn(*shape).double() for shape in ((4, 3, 16), (4, 3, 8), (20, 40)))
    with torch.no_grad():
        expanded, absorbed = layer.expanded(q, q_rotated, cache), layer.absorbed(q, q_rotated, cache)
    assert expanded.shape == (4, 3, 16)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-12, atol=1e-12)


def test_the_layer_s_cache_is_what_the_operation_takes():
    """The exact answer of a problem, from the layer's own attention."""
    task = problem((70,), {"paged": False})
    tensors = make_inputs(task)
    q, cache = tensors.q[0, 0].double()[:, None], tensors.k_cache[0, :, 0].double()
    right = task.asked.compute(task, tensors.by_name, torch.float64)["o"]
    o = latent_attention(q, cache, 512, task.softmax_scale)[:, 0]
    torch.testing.assert_close(o, right[0, 0], rtol=1e-10, atol=1e-10)
