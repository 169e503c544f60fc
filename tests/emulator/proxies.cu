// Small kernels in which threads, bulk copies and wgmma meet in shared memory: right, and with one defect each.
#include <stdint.h>

enum Defect {
    none, no_proxy_fence, late_proxy_fence, no_barrier, no_wait_read, other_thread_waits, no_full_wait, no_empty_wait,
    no_syncwarp, no_init_fence, no_init_barrier, wrong_parity, few_bytes, many_bytes, few_arrivals, many_arrivals,
    one_lane_waits, no_wgmma_fence, no_wgmma_wait, late_wgmma_wait, register_overwritten, early_release, wrong_count,
    no_commit, cta_scope, no_cluster_barrier, no_read_fence, read_fence
};

constexpr int words = 1024, bytes = 4 * words, stages = 2, tiles = 5, consumers = 64;

__device__ inline uint32_t address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void init(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}
__device__ inline void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
__device__ inline void expect(uint64_t *barrier, int count) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}
__device__ inline void wait(uint64_t *barrier, int parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(
                     address(barrier)),
                 "r"(parity)
                 : "memory");
}
__device__ inline void load(void *to, const void *from, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(address(barrier))
                 : "memory");
}
__device__ inline void store(void *to, const void *from) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(address(from)), "r"(bytes)
                 : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

#define KERNEL(name, defect) \
    extern "C" __global__ void __launch_bounds__(160) name##_##defect(const int *in, int *out) { name<defect>(in, out); }

// Every thread writes words of a tile, which a copy then reads; twice, into one tile.
template <Defect defect>
__device__ inline void written_tile(const int *in, int *out) {
    __shared__ alignas(128) int tile[words];
    for (int round = 0; round < 2; ++round) {
        for (int i = threadIdx.x; i < words; i += blockDim.x)
            tile[i] = in[i] + round;  // written
        if (defect != no_proxy_fence && defect != late_proxy_fence) proxy_fence();
        if (defect != no_barrier) __syncthreads();
        if (defect == late_proxy_fence) proxy_fence();
        if (threadIdx.x == 0) {
            store(out + (2 * blockIdx.x + round) * words, tile);  // copied out
            if (defect != no_commit) commit();
            if (defect != no_wait_read && defect != other_thread_waits) wait_read();
        }
        if (defect == other_thread_waits && threadIdx.x == 32) wait_read();
        __syncthreads();
    }
    if ((defect == no_wait_read || defect == other_thread_waits) && threadIdx.x == 0) wait_read();
}
KERNEL(written_tile, none)
KERNEL(written_tile, no_proxy_fence)
KERNEL(written_tile, late_proxy_fence)
KERNEL(written_tile, no_barrier)
KERNEL(written_tile, no_wait_read)
KERNEL(written_tile, other_thread_waits)
KERNEL(written_tile, no_commit)

// The last warp copies tiles into a ring; the others sum them up.
template <Defect defect>
__device__ inline void ring(const int *in, int *out) {
    __shared__ alignas(128) int tile[stages][words];
    __shared__ uint64_t full[stages], empty[stages];
    const int warps = consumers / 32;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; ++stage) {
            init(&full[stage], 1);
            init(&empty[stage], warps - (defect == few_arrivals) + (defect == many_arrivals));
        }
        if (defect != no_init_fence) init_fence();
    }
    if (defect != no_init_barrier) __syncthreads();
    if (threadIdx.x == consumers) {
        for (int j = 0; j < tiles; ++j) {
            const int stage = j % stages, turn = j / stages;
            if (defect != no_empty_wait) wait(&empty[stage], turn + 1 & 1);
            expect(&full[stage], bytes - 16 * (defect == few_bytes) + 16 * (defect == many_bytes));
            load(tile[stage], in + j * words, &full[stage]);  // copied in
        }
    }
    if (threadIdx.x >= consumers) return;
    int sum = 0;
    for (int j = 0; j < tiles; ++j) {
        const int stage = j % stages, turn = j / stages;
        if (defect == one_lane_waits) {
            if (threadIdx.x % 32 == 0) wait(&full[stage], turn & 1);
        } else {
            wait(&full[stage], turn + (defect == wrong_parity) & 1);
        }
        if (defect == early_release && threadIdx.x % 32 == 0) arrive(&empty[stage]);
        for (int i = threadIdx.x; i < words; i += consumers)
            sum += tile[stage][i];  // read
        if (defect != no_read_fence) proxy_fence();
        if (defect != no_syncwarp) __syncwarp();
        if (defect != early_release && threadIdx.x % 32 == 0) arrive(&empty[stage]);
    }
    out[blockIdx.x * consumers + threadIdx.x] = sum;
}
KERNEL(ring, none)
KERNEL(ring, no_init_fence)
KERNEL(ring, no_init_barrier)
KERNEL(ring, no_empty_wait)
KERNEL(ring, early_release)
KERNEL(ring, no_read_fence)
KERNEL(ring, one_lane_waits)
KERNEL(ring, no_syncwarp)
KERNEL(ring, wrong_parity)
KERNEL(ring, few_bytes)
KERNEL(ring, many_bytes)
KERNEL(ring, few_arrivals)
KERNEL(ring, many_arrivals)

// One tile holds Q, then O: a copy brings Q, threads read it and put O into its place, a copy takes O away.
template <Defect defect>
__device__ inline void shared_tile(const int *in, int *out) {
    __shared__ alignas(128) int tile[words];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        init(&full, 1);
        init_fence();
    }
    __syncthreads();
    for (int round = 0; round < 3; ++round) {
        if (threadIdx.x == 0) {
            expect(&full, bytes);
            load(tile, in + round * words, &full);  // Q comes
        }
        if (defect != no_full_wait) wait(&full, round & 1);
        int mine[words / 128];
        for (int i = 0; i < words / 128; ++i) mine[i] = tile[128 * i + (threadIdx.x ^ 32)];  // Q is read
        if (defect != no_barrier) __syncthreads();
        for (int i = 0; i < words / 128; ++i) tile[128 * i + threadIdx.x] = 2 * mine[i];  // O is written
        proxy_fence();
        __syncthreads();
        if (threadIdx.x == 0) {
            store(out + (3 * blockIdx.x + round) * words, tile);  // O goes
            commit();
            if (defect != early_release) wait_read();
        }
    }
    if (threadIdx.x == 0) wait_read();
}
KERNEL(shared_tile, none)
KERNEL(shared_tile, no_full_wait)
KERNEL(shared_tile, no_barrier)
KERNEL(shared_tile, early_release)

// A product of a warpgroup, whose operands threads wrote; then the fifth warp has a copy put into their place.
__device__ inline uint64_t descriptor(const void *tile) {
    return static_cast<uint64_t>(address(tile) >> 4) | 8ull << 16 | 16ull << 32;  // no swizzle: 128 and 256 bytes apart
}
template <Defect defect>
__device__ inline void product(const int *in, int *out) {
    __shared__ alignas(128) int tile[words];  // 2 KiB of A, then B
    __shared__ uint64_t full, empty;
    if (threadIdx.x == 0) {
        init(&full, 1);
        init(&empty, 1);
        init_fence();
    }
    for (int i = threadIdx.x; i < words; i += blockDim.x)
        tile[i] = in[i];  // written
    if (defect != no_proxy_fence) proxy_fence();
    __syncthreads();
    if (threadIdx.x >= 128) {
        if (threadIdx.x > 128) return;
        wait(&empty, 0);
        expect(&full, bytes);
        load(tile, in, &full);  // copied in
        wait(&full, 0);
        return;
    }
    float d[4] = {};
    uint32_t a[4] = {1, 2, 3, threadIdx.x};
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[i]), "+r"(a[i])::"memory");  // registers of their own
    if (defect != no_wgmma_fence) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    if (defect == register_overwritten)
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;\n"
                     "mov.b32 %4, 7;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+r"(a[0])
                     : "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(tile + 512)));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "l"(descriptor(tile)), "l"(descriptor(tile + 512)));  // multiplied
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (defect == early_release && threadIdx.x == 0) arrive(&empty);
    if (defect == no_wgmma_wait) tile[threadIdx.x] = 0;  // overwritten
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (defect != early_release && threadIdx.x == 0) arrive(&empty);
    out[blockIdx.x * 128 + threadIdx.x] = d[0] + d[1] + d[2] + d[3] + a[0];
}
KERNEL(product, none)
KERNEL(product, no_proxy_fence)
KERNEL(product, no_wgmma_fence)
KERNEL(product, no_wgmma_wait)
KERNEL(product, early_release)
KERNEL(product, register_overwritten)

// The fifth warp copies tiles into one place; a warpgroup loads each into registers, gives the place back, and multiplies.
template <Defect defect>
__device__ inline void held_tile(const int *in, int *out) {
    __shared__ alignas(128) int tile[words], b[64];
    __shared__ uint64_t full, empty;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        init(&full, 1);
        init(&empty, 4);
        init_fence();
    }
    if (threadIdx.x < 64) b[threadIdx.x] = in[threadIdx.x];
    proxy_fence();
    __syncthreads();
    if (threadIdx.x >= 128) {
        for (int round = 0; threadIdx.x == 128 && round < 3; ++round) {
            wait(&empty, round + 1 & 1);
            expect(&full, bytes);
            load(tile, in + round * words, &full);  // copied in
        }
        return;
    }
    float sum = 0;
    for (int round = 0; round < 3; ++round) {
        uint32_t a[4];
        float d[4] = {};
        wait(&full, round & 1);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(address(tile) + 32 * (16 * warp + lane % 16) + lane / 16 * 16)  // loaded
                     : "memory");
        if (defect == read_fence) proxy_fence();
        if (defect != none) __syncwarp();
        if (defect != none && lane == 0) arrive(&empty);
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[i])::"memory");  // registers of their own
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (defect == none && lane == 0) arrive(&empty);
        sum += d[0] + d[1] + d[2] + d[3];
    }
    out[blockIdx.x * 128 + threadIdx.x] = sum;
}
KERNEL(held_tile, none)
KERNEL(held_tile, read_fence)
KERNEL(held_tile, no_read_fence)

// A named barrier of three of the four warps.
template <Defect defect>
__device__ inline void three_warps(const int *in, int *out) {
    __shared__ int tile[128];
    if (threadIdx.x >= 96) return;
    tile[threadIdx.x] = in[threadIdx.x];  // written
    asm volatile("bar.sync 1, %0;" ::"n"(defect == wrong_count ? 64 : 96) : "memory");
    out[blockIdx.x * 96 + threadIdx.x] = tile[(threadIdx.x + 32) % 96];  // read
}
KERNEL(three_warps, none)
KERNEL(three_warps, wrong_count)

// Each CTA of a cluster of two writes into the memory of the other one, and arrives at its mbarrier.
template <Defect defect>
__device__ inline void exchange(const int *in, int *out) {
    __shared__ int tile[128];
    __shared__ uint64_t bar;
    uint32_t rank, tile_there, bar_there;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
        init(&bar, 128);
        init_fence();
    }
    if (defect != no_cluster_barrier)
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(tile_there) : "r"(address(&tile[threadIdx.x])), "r"(rank ^ 1));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar_there) : "r"(address(&bar)), "r"(rank ^ 1));
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(tile_there), "r"(in[threadIdx.x] + rank) : "memory");  // written
    if (defect == cta_scope)
        asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(bar_there) : "memory");
    else
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar_there) : "memory");  // arrived
    wait(&bar, 0);
    out[blockIdx.x * 128 + threadIdx.x] = tile[threadIdx.x ^ 32];  // read there
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#define CLUSTER_KERNEL(name, defect) \
    extern "C" __global__ void __cluster_dims__(2) name##_##defect(const int *in, int *out) { name<defect>(in, out); }
CLUSTER_KERNEL(exchange, none)
CLUSTER_KERNEL(exchange, cta_scope)
CLUSTER_KERNEL(exchange, no_cluster_barrier)
