// Clusters of CTAs, which read each other's shared memory. PTX ISA, barrier.cluster, mapa and ld.shared::cluster.
#pragma once
#include "sm80.cuh"

__device__ inline unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of the cluster meet, and each sees what the others wrote before. A warp comes as one: where its lanes came
// apart, as behind a loop of one lane, each part would count as the whole warp.
__device__ inline void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place of this CTA, by an address without its rank, which a cluster's addresses have above their low 24 bits. For
// matrix descriptors.
template <class T>
__device__ inline const T *without_rank(const T *place) {
    return static_cast<const T *>(__cvta_shared_to_generic(shared_address(place) & 0xffffff));
}

// Where the CTA of a rank has what this one has at `place`, an address of shared memory.
__device__ inline unsigned in_cta(unsigned place, unsigned rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
    return there;
}

__device__ inline float load_cluster_4(unsigned place) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(place) : "memory");
    return x;
}
__device__ inline float4 load_cluster_16(unsigned place) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(place)
                 : "memory");
    return x;
}
