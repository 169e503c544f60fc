"""Kernels in clusters, and ones that begin before the kernel before them has ended: on the emulator and on a GPU."""

import shutil
from pathlib import Path

import pytest
import torch

from flashladder.common import catalog, own
from flashladder.common.compiler import build_one, translate
from flashladder.common.errors import EmulatorError
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator, on_gpu
from flashladder.common.runtime.gpu import device_arch

HERE = Path(__file__).parent
NAME = HERE.name

# The two CTAs of a cluster sum half a row each, and the first one adds them up; a second kernel puts them into place.
KERNELS = """
#include "row_dots.cuh"
using namespace config;

struct Lent {
    float *sums;
};
FLASHLADDER_WORKSPACE(sums, float, "batch * num_heads * seqlen_q");

__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

FLASHLADDER_KERNEL(sum_rows, RowDotsParams,
                   Launch{block_m, 0, block_m}
                       .over("cdiv(seqlen_q, block_m)", "2 * num_heads", "batch")
                       .clusters(1, 2));
extern "C" __global__ void sum_rows(const __grid_constant__ RowDotsParams p, const __grid_constant__ Lent lent) {
    __shared__ float sums[block_m];
    const int row = blockIdx.x * block_m + threadIdx.x, head = blockIdx.y / 2, half = blockIdx.y % 2;
    const int place = (blockIdx.z * p.num_heads + head) * p.seqlen_q + row;
    const bool is_row = row < p.seqlen_q;
    asm volatile("griddepcontrol.launch_dependents;");
    sums[threadIdx.x] = is_row ? dot(p, blockIdx.z, head, row, half * head_dim_v / 2, (half + 1) * head_dim_v / 2) : 0;
    cluster_sync();
    if (half == 0 && is_row) {
        const unsigned here = __cvta_generic_to_shared(&sums[threadIdx.x]);
        unsigned there;
        float other;
        asm("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(there) : "r"(here));
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(other) : "r"(there) : "memory");
        lent.sums[place] = sums[threadIdx.x] + other;
    }
    cluster_sync();  // the other one's memory is there until it has been read
}

FLASHLADDER_KERNEL(attention_row_dots, RowDotsParams, Launch{block_m, 0, block_m}.dependent());
extern "C" __global__ void attention_row_dots(const __grid_constant__ RowDotsParams p,
                                              const __grid_constant__ Lent lent) {
    const int row = blockIdx.x * block_m + threadIdx.x;
    const int place = (blockIdx.z * p.num_heads + blockIdx.y) * p.seqlen_q + row;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (row < p.seqlen_q) p.dots[place] = lent.sums[place];
}
"""
DEPENDENT = "FLASHLADDER_KERNEL(attention_row_dots"
BETWEEN = """
FLASHLADDER_KERNEL(between, RowDotsParams, Launch{32, 0, block_m});
extern "C" __global__ void between(const __grid_constant__ RowDotsParams, const __grid_constant__ Lent lent) {BODY}
"""
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a rung of these kernels, or one in which texts are replaced by others."""
    folder = tmp_path / NAME
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("test_*", "bench.py", "__pycache__"))
    monkeypatch.setenv(own.VARIABLE, str(folder))

    def made(changes=None):
        kernels = KERNELS
        for old, new in (changes or {}).items():
            assert old in kernels
            kernels = kernels.replace(old, new)
        rung, yaml = folder / "02_clusters", (folder / "00_rows" / "version.yaml").read_text()
        rung.mkdir()
        (rung / "version.yaml").write_text(yaml.replace("ampere", "hopper"))
        (rung / "kernel.cu").write_text(kernels)
        return catalog.find(f"{NAME}/02")

    return made


def problem(**options):
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 70, "head_dim": 96, "head_dim_v": 64}
    return Problem(**(sizes | options), operation=NAME)


def emulate(rung, task):
    tensors = make_inputs(task)
    on_emulator(translate(rung, rung.config_for(task), "sm_90a"), task, tensors)
    verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(rung.name)


def test_clusters_and_a_dependent_kernel(make):
    emulate(make(), problem())


@pytest.mark.parametrize("new", ["", "if (threadIdx.x == 0) " + WAIT], ids=["no wait", "one thread waits"])
def test_a_dependent_kernel_that_does_not_wait_is_named(make, new):
    with pytest.raises(EmulatorError) as error:
        emulate(make({WAIT: new}), problem())
    message = str(error.value)
    assert "tensor workspace sums" in message
    assert "sum_rows, before which attention_row_dots may begin, may still write it" in message
    assert "kernel.cu:" in message
    assert "mend: griddepcontrol.wait before" in message


IN_CLUSTERS = {".dependent()": ".clusters(1, 2).dependent()"}


@pytest.mark.parametrize("new", ["", "if (threadIdx.x == 0) " + WAIT], ids=["no wait", "one thread waits"])
def test_so_is_one_in_clusters(make, new):
    with pytest.raises(EmulatorError, match="sum_rows, before which attention_row_dots may begin, may still write it"):
        emulate(make({WAIT: new, **IN_CLUSTERS}), problem())


@pytest.mark.parametrize(
    "new",
    [WAIT, "if (threadIdx.x == 0 && blockIdx.y % 2 == 1) " + WAIT + " cluster_sync();"],
    ids=["all", "one for all"],
)
def test_in_clusters_one_thread_may_wait_for_all(make, new):
    emulate(make({WAIT: new, **IN_CLUSTERS}), problem())


def test_what_a_kernel_wrote_that_has_ended_needs_no_wait(make):
    """The kernel between the two depends on nothing, so the first one has ended when the third one begins."""
    emulate(make({WAIT: "", DEPENDENT: BETWEEN.replace("BODY", "") + DEPENDENT}), problem())


def test_of_three_kernels_the_one_that_may_still_write_is_named(make):
    writes = "if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) lent.sums[0] = 1.0f;"
    with pytest.raises(EmulatorError, match="between, before which attention_row_dots may begin, may still write it"):
        emulate(make({WAIT: "", DEPENDENT: BETWEEN.replace("BODY", writes) + DEPENDENT}), problem())


def test_a_kernel_that_depends_on_nothing_need_not_wait(make):
    emulate(make({".dependent()": ""}), problem())


def test_without_its_clusters_a_kernel_is_found_out(make):
    with pytest.raises(EmulatorError):
        emulate(make({".clusters(1, 2)": ""}), problem())


def test_clusters_of_another_shape_than_the_code_is_compiled_for(make):
    rung = make({"void sum_rows": "void __cluster_dims__(1, 4, 1) sum_rows"})
    with pytest.raises(
        EmulatorError, match=r"sum_rows is launched in clusters of \(1, 2, 1\), but compiled for \(1, 4, 1\)"
    ):
        emulate(rung, problem())


@pytest.mark.gpu
def test_clusters_and_a_dependent_kernel_on_a_gpu(make):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is not Hopper")
    rung, task = make(), problem(batch=4, num_heads=8, seqlen_q=5000)
    tensors = make_inputs(task, "cuda")
    launch = on_gpu(build_one(rung, rung.config_for(task), device_arch()), task, tensors)
    graph = torch.cuda.CUDAGraph()
    launch()  # loads what a capture cannot
    with torch.cuda.graph(graph):
        launch()
    for run in (launch, launch, graph.replay):
        tensors.poison()
        run()
        torch.cuda.synchronize()
        verify(expect(task, tensors), tensors.outputs, tensors.buffers).require(rung.name)
