// A loop with an mma and a branch that is seldom taken, in a loop over tiles.
__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
extern "C" __global__ void attention_forward(const unsigned *in, float *out, int tiles, int steps) {
    __shared__ unsigned shared[1024];
    const unsigned a[4] = {in[threadIdx.x], in[threadIdx.x + 32], in[threadIdx.x + 64], in[threadIdx.x + 96]};
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float c[4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            unsigned to = (unsigned)__cvta_generic_to_shared(shared + threadIdx.x * 4);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + step * 128 + threadIdx.x * 4) : "memory");
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            mma(c, a, shared[threadIdx.x], shared[threadIdx.x ^ 7]);
            if (__any_sync(0xffffffff, c[0] > 100.0f)) {
#pragma unroll
                for (int i = 0; i < 4; ++i) c[i] *= exp2f(-c[0]);
            }
            __syncthreads();
        }
        for (int i = 0; i < 4; ++i) out[tile * 128 + threadIdx.x + i * 32] = c[i];
    }
}
