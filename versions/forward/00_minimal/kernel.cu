// FlashAttention in its plainest form: tiles of K and V in shared memory, an online softmax, no tensor cores.
//
//     O = softmax(scale * Q K^T) V, for one head at a time
//
// Of S = Q K^T it never holds more than block_n columns. Four neighbouring lanes (a quad) share one row of Q. Each
// holds every fourth 8-column chunk of q and of o. A dot product is first summed over a lane's own chunks, then over
// the four lanes. It takes any sequence lengths.
#include "config.cuh"
#include "params.cuh"

using namespace config;

constexpr int quad = 4;
constexpr int chunk = 8;  // 8 elements of 16 bits: one 16-byte load
constexpr int lane_cols = head_dim / quad;
constexpr int num_threads = block_m * quad;
constexpr float log2_e = 1.4426950408889634f;

static_assert(block_m % 8 == 0, "a warp holds 8 rows");
FLASHLADDER_LAUNCH(num_threads, 2 * block_n * head_dim * sizeof(dtype), block_m, block_n);

// The column of the lane's i-th element. Chunks are given to the quad in turn.
__device__ constexpr int column(int i, int lane) { return (i / chunk * quad + lane) * chunk + i % chunk; }

// One lane's share of a row, as floats.
__device__ void load_row(float (&row)[lane_cols], const dtype *source, int lane) {
#pragma unroll
    for (int i = 0; i < lane_cols; i += chunk) {
        const uint4 bits = *reinterpret_cast<const uint4 *>(source + column(i, lane));
        const dtype *elements = reinterpret_cast<const dtype *>(&bits);
#pragma unroll
        for (int e = 0; e < chunk; ++e) row[i + e] = static_cast<float>(elements[e]);
    }
}

// Copies rows of K or V to shared memory. Rows past the end become zeros, so that masked values are finite.
__device__ void load_tile(dtype *shared, const dtype *global, long long row_stride, int rows) {
    constexpr int chunks_per_row = head_dim / chunk;
    for (int i = threadIdx.x; i < block_n * chunks_per_row; i += num_threads) {
        const int row = i / chunks_per_row, col = i % chunks_per_row * chunk;
        reinterpret_cast<uint4 *>(shared)[i] =
            row < rows ? *reinterpret_cast<const uint4 *>(global + row * row_stride + col) : uint4{0, 0, 0, 0};
    }
}

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_k = reinterpret_cast<dtype *>(shared);
    dtype *shared_v = shared_k + block_n * head_dim;

    const int row = blockIdx.x * block_m + threadIdx.x / quad, lane = threadIdx.x % quad;
    const int head = blockIdx.y, head_k = head / (params.num_heads / params.num_heads_k), batch = blockIdx.z;
    const bool has_row = row < params.seqlen_q;

    const dtype *k = static_cast<const dtype *>(params.k) + batch * params.k_stride.batch + head_k * params.k_stride.head;
    const dtype *v = static_cast<const dtype *>(params.v) + batch * params.v_stride.batch + head_k * params.v_stride.head;

    float q[lane_cols] = {}, o[lane_cols] = {};
    float m = -INFINITY, l = 0.0f;  // the running maximum and sum of the row
    const dtype *first = static_cast<const dtype *>(params.q) + batch * params.q_stride.batch;
    if (has_row) load_row(q, first + row * params.q_stride.row + head * params.q_stride.head, lane);

    for (int first_key = 0; first_key < params.seqlen_k; first_key += block_n) {
        const int keys = min(block_n, params.seqlen_k - first_key);
        __syncthreads();  // every thread has read the previous tile
        load_tile(shared_k, k + first_key * params.k_stride.row, params.k_stride.row, keys);
        load_tile(shared_v, v + first_key * params.v_stride.row, params.v_stride.row, keys);
        __syncthreads();  // the tile is whole

        // s = scale * q K^T, in log2 units
        float s[block_n], block_max = m;
#pragma unroll
        for (int n = 0; n < block_n; ++n) {
            float key[lane_cols], dot = 0.0f;
            load_row(key, shared_k + n * head_dim, lane);
#pragma unroll
            for (int i = 0; i < lane_cols; ++i) dot += q[i] * key[i];
            dot += __shfl_xor_sync(0xffffffff, dot, 1);
            dot += __shfl_xor_sync(0xffffffff, dot, 2);
            s[n] = n < keys ? dot * params.softmax_scale * log2_e : -INFINITY;
            block_max = fmaxf(block_max, s[n]);
        }

        // bring l and o, the sums so far, down to the new maximum
        const float rescale = exp2f(m - block_max);
        m = block_max;
        l *= rescale;
#pragma unroll
        for (int i = 0; i < lane_cols; ++i) o[i] *= rescale;

        // o += p V
#pragma unroll
        for (int n = 0; n < block_n; ++n) {
            const float p = exp2f(s[n] - m);
            float value[lane_cols];
            load_row(value, shared_v + n * head_dim, lane);
            l += p;
#pragma unroll
            for (int i = 0; i < lane_cols; ++i) o[i] += p * value[i];
        }
    }

    if (!has_row) return;
    dtype *out = static_cast<dtype *>(params.o) + batch * params.o_stride.batch + row * params.o_stride.row +
                 head * params.o_stride.head;
#pragma unroll
    for (int i = 0; i < lane_cols; ++i) out[column(i, lane)] = static_cast<dtype>(o[i] / l);
    if (params.lse != nullptr && lane == 0)
        params.lse[(static_cast<long long>(batch) * params.num_heads + head) * params.seqlen_q + row] = (m + log2f(l)) / log2_e;
}
