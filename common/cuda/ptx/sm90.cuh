// What runs beside the threads on Hopper, and how they wait for it: TMA copies, mbarriers, proxies, registers that move
// between warpgroups. One function per instruction; names follow the PTX ISA. sm_90a.
#pragma once
#include "ptx/named_barrier.cuh"
#include "ptx/sm80.cuh"

// A tensor map: the host has put it into the kernel's parameters, where TMA reads it.
struct alignas(64) TensorMapBytes {
    unsigned char bytes[128];
};

// Shared memory written by ordinary code is seen by what runs beside it (TMA, wgmma) only after this.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers that were just made are seen by TMA only after this.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// A barrier in shared memory that counts arrivals of threads, and bytes that TMA brings. When both are complete its phase
// ends, and the next one begins. Phases are told apart by their parity: the first one's is 0.
struct Mbarrier {
    uint64_t word;

    __device__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(arrivals) : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
    }
    // One arrival for a whole warp, whose lanes are together here.
    __device__ void arrive_as_warp() {
        if (threadIdx.x % 32 == 0) arrive();
    }
    // Arrives, and tells of bytes that are yet to come in this phase.
    __device__ void arrive_expecting(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                     : "memory");
    }
    // Waits until the phase of this parity has ended. The one before the first counts as ended: its parity is 1.
    __device__ void wait(uint32_t parity) {
        asm volatile("{\n.reg .pred done;\nagain:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again;\n}" ::"r"(shared_address(&word)),
                     "r"(parity)
                     : "memory");
    }
};

// Starts copying a box of a tensor (column, row, head, batch) to shared memory. `full` counts its bytes.
__device__ inline void tma_load(void *shared, const TensorMapBytes &map, Mbarrier &full, int column, int row, int head,
                                int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
                 "l"(&map), "r"(shared_address(&full.word)), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// The same for bytes that lie one behind the other: 16 of them, or a multiple, at addresses that are multiples of 16.
__device__ inline void bulk_load(void *shared, const void *global, int bytes, Mbarrier &full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(&full.word))
                 : "memory");
}

// Asks L2 for such bytes, which will be read soon.
__device__ inline void bulk_prefetch(const void *global, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Starts copying a box from shared memory to a tensor; what lies outside of the tensor is left out. The shared memory was
// written by ordinary code, so `fence_proxy_async` comes before.
__device__ inline void tma_store(const TensorMapBytes &map, const void *shared, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
// The same for floats that lie one behind the other, which are added to those in global memory, one by one.
__device__ inline void bulk_add(float *global, const float *shared, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}
// The same, in the place of those in global memory.
__device__ inline void bulk_store(float *global, const float *shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
                 "r"(bytes)
                 : "memory");
}
// Closes the group of stores that this thread has started.
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's stores are done: others see what they wrote, if this thread tells them.
__device__ inline void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Waits until all of this thread's stores have read their shared memory.
__device__ inline void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Releases registers of this warpgroup, or takes some that were released, and waits for them. Each thread then has
// `count`, a multiple of 8.
template <int count>
__device__ inline void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// The other way round than ldmatrix_x4: four 8 x 8 blocks of 16-bit elements to shared memory.
__device__ inline void stmatrix_x4(uint32_t shared, const uint32_t (&block)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(block[0]),
                 "r"(block[1]), "r"(block[2]), "r"(block[3])
                 : "memory");
}

// The same, each block transposed on its way.
__device__ inline void stmatrix_x4_trans(uint32_t shared, const uint32_t (&block)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(block[0]),
                 "r"(block[1]), "r"(block[2]), "r"(block[3])
                 : "memory");
}

// Two blocks, each transposed on its way. Lanes 0 to 15 say where its columns go.
__device__ inline void stmatrix_x2_trans(uint32_t shared, uint32_t first, uint32_t second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared), "r"(first), "r"(second)
                 : "memory");
}

// Stores a float if it is `wanted`, without a branch.
__device__ inline void store_global_4_if(bool wanted, float *global, float value) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\n@wanted st.global.f32 [%0], %1;\n}" ::"l"(global),
                 "f"(value), "r"(static_cast<int>(wanted))
                 : "memory");
}
