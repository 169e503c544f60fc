// TMA copies to several CTAs of a cluster, and mbarriers between them. One function per instruction; names follow the PTX ISA.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/sm90.cuh"

// As tma_load, to the same place in each CTA of the cluster whose bit is set in `ranks`; its own `full` counts the bytes there.
__device__ inline void tma_load_multicast(void *shared, const TensorMapBytes &map, Mbarrier &full, int column, int row,
                                          int head, int batch, uint16_t ranks) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
                 "l"(&map), "r"(shared_address(&full.word)), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(ranks)
                 : "memory");
}

// Arrives at the barrier in the place of this one in the CTA of a rank.
__device__ inline void arrive_at(Mbarrier &barrier, unsigned rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     in_cta(shared_address(&barrier.word), rank))
                 : "memory");
}

// Waits as Mbarrier's own `wait` does, at a barrier where threads of other CTAs arrive too.
__device__ inline void wait_for_cluster(Mbarrier &barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(&barrier.word)),
                 "r"(parity)
                 : "memory");
}

// Stores 16 bytes to the shared memory of a CTA of the cluster, at an address that `in_cta` gives.
__device__ inline void store_cluster_16(unsigned place, uint4 value) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// As fence_proxy_async, of what was written to any CTA of the cluster.
__device__ inline void fence_proxy_async_cluster() { asm volatile("fence.proxy.async.shared::cluster;" ::: "memory"); }
