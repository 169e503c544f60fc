// The backward pass in its plainest form: a tile of K and V stays, the rows of Q pass by, no tensor cores.
//
//     P = exp(S - lse), S = scale * Q K^T      dV = P^T dO      dP = dO V^T
//     dS = P * (dP - delta)                    dK = scale * dS^T Q      dQ = scale * dS K
//
// Four neighbouring lanes (a quad) share one key: its rows of K and V, and of dK and dV, which are sums over the rows of
// Q. dQ is a sum over the keys. Many CTAs add to it, in fp32. Three kernels: delta of every row, the loop, dQ rounded.
#include "backward.cuh"

using namespace config;

constexpr int quad = 4;
constexpr int chunk = 8;  // 8 elements of 16 bits: one 16-byte load
constexpr int lane_cols = head_dim / quad;
constexpr int num_threads = block_n * quad;

// A tile of rows of Q and dO, the tile of K, and dS of both.
struct Shared {
    dtype q[block_m][head_dim], dout[block_m][head_dim], k[block_n][head_dim];
    float ds[block_m][block_n];
};

FLASHLADDER_KERNEL(backward_prepare, BackwardParams, pass_launch);
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_prepare(const __grid_constant__ BackwardParams p, const __grid_constant__ Workspaces workspaces) {
    prepare_row(p, workspaces);
}

// The column of the lane's i-th element. Chunks are dealt to the quad in turn.
__device__ constexpr int column(int i, int lane) { return (i / chunk * quad + lane) * chunk + i % chunk; }

__device__ void load_chunk(float *to, const dtype *from) {
    const uint4 bits = *reinterpret_cast<const uint4 *>(from);
#pragma unroll
    for (int e = 0; e < chunk; ++e) to[e] = static_cast<float>(reinterpret_cast<const dtype *>(&bits)[e]);
}

// One lane's share of a row.
__device__ void load_row(float (&row)[lane_cols], const dtype *from, int lane) {
#pragma unroll
    for (int i = 0; i < lane_cols; i += chunk) load_chunk(row + i, from + column(i, lane));
}

// Copies rows of a head to shared memory.
__device__ void load_tile(dtype *shared, const dtype *rows, long long row_stride, int count) {
    constexpr int chunks_per_row = head_dim / chunk;
    for (int i = threadIdx.x; i < count * chunks_per_row; i += num_threads)
        reinterpret_cast<uint4 *>(shared)[i] =
            *reinterpret_cast<const uint4 *>(rows + i / chunks_per_row * row_stride + i % chunks_per_row * chunk);
}

// The product of two rows, summed over the quad.
__device__ float dot(const float (&a)[lane_cols], const float (&b)[lane_cols]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < lane_cols; ++i) sum += a[i] * b[i];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    return sum + __shfl_xor_sync(0xffffffff, sum, 2);
}

FLASHLADDER_KERNEL(attention_backward, BackwardParams,
                   Launch{num_threads, sizeof(Shared), block_m, block_n}.over("cdiv(seqlen_k, block_n)", "num_heads_k", "batch"));
extern "C" __global__ void __launch_bounds__(num_threads)
    attention_backward(const __grid_constant__ BackwardParams p, const __grid_constant__ Workspaces workspaces) {
    extern __shared__ __align__(128) char shared_memory[];
    Shared &shared = *reinterpret_cast<Shared *>(shared_memory);

    const int batch = blockIdx.z, head_k = blockIdx.y, group = p.num_heads / p.num_heads_k;
    const int first_key = blockIdx.x * block_n, keys = min(block_n, p.seqlen_k - first_key);
    const int n = threadIdx.x / quad, lane = threadIdx.x % quad, key = first_key + n;
    const bool has_key = n < keys;

    load_tile(shared.k[0], head_of(p.k, p.k_stride, batch, head_k) + first_key * p.k_stride.row, p.k_stride.row, keys);
    float k[lane_cols] = {}, v[lane_cols] = {}, dk[lane_cols] = {}, dv[lane_cols] = {};
    if (has_key) {
        load_row(k, head_of(p.k, p.k_stride, batch, head_k) + key * p.k_stride.row, lane);
        load_row(v, head_of(p.v, p.v_stride, batch, head_k) + key * p.v_stride.row, lane);
    }

    for (int head = head_k * group; head < (head_k + 1) * group; ++head) {
        const dtype *q = head_of(p.q, p.q_stride, batch, head), *dout = head_of(p.dout, p.dout_stride, batch, head);
        const long long first_row_of_head = (static_cast<long long>(batch) * p.num_heads + head) * p.seqlen_q;

        for (int first_row = 0; first_row < p.seqlen_q; first_row += block_m) {
            const int rows = min(block_m, p.seqlen_q - first_row);
            __syncthreads();  // every thread has read the previous tile
            load_tile(shared.q[0], q + first_row * p.q_stride.row, p.q_stride.row, rows);
            load_tile(shared.dout[0], dout + first_row * p.dout_stride.row, p.dout_stride.row, rows);
            __syncthreads();  // the tile is whole

            for (int m = 0; m < rows; ++m) {
                const long long row = first_row_of_head + first_row + m;
                const bool sees = has_key && (!causal || key <= first_row + m + p.seqlen_k - p.seqlen_q);
                float q_row[lane_cols], dout_row[lane_cols];
                load_row(q_row, shared.q[m], lane);
                load_row(dout_row, shared.dout[m], lane);
                const float score = p.softmax_scale * dot(k, q_row);
                const float probability = sees ? expf(score - p.lse[row]) : 0.0f;
                const float ds = probability * (dot(v, dout_row) - workspaces.delta[row]);
#pragma unroll
                for (int i = 0; i < lane_cols; ++i) {
                    dv[i] += probability * dout_row[i];
                    dk[i] += ds * q_row[i];
                }
                if (lane == 0) shared.ds[m][n] = ds;
            }
            __syncthreads();  // dS is whole

            // dQ += dS K, without the scale
            for (int i = threadIdx.x * chunk; i < rows * head_dim; i += num_threads * chunk) {
                float sum[chunk] = {}, k_chunk[chunk];
                for (int other = 0; other < keys; ++other) {
                    load_chunk(k_chunk, &shared.k[other][i % head_dim]);
#pragma unroll
                    for (int e = 0; e < chunk; ++e) sum[e] += shared.ds[i / head_dim][other] * k_chunk[e];
                }
#pragma unroll
                for (int e = 0; e < chunk; ++e)
                    atomicAdd(workspaces.dq_sum + (first_row_of_head + first_row) * head_dim + i + e, sum[e]);
            }
        }
    }

    if (!has_key) return;
    dtype *dk_row = head_of(p.dk, p.dk_stride, batch, head_k) + key * p.dk_stride.row;
    dtype *dv_row = head_of(p.dv, p.dv_stride, batch, head_k) + key * p.dv_stride.row;
#pragma unroll
    for (int i = 0; i < lane_cols; ++i) {
        dk_row[column(i, lane)] = static_cast<dtype>(dk[i] * p.softmax_scale);
        dv_row[column(i, lane)] = static_cast<dtype>(dv[i]);
    }
}

FLASHLADDER_KERNEL(backward_finish, BackwardParams, pass_launch);
extern "C" __global__ void __launch_bounds__(pass_threads)
    backward_finish(const __grid_constant__ BackwardParams p, const __grid_constant__ Workspaces workspaces) {
    finish_row(p, workspaces);
}
