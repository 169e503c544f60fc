// Decode in its plainest form: a CTA has one row of Q, and its threads read each key of the sequence once.
//
// A key's columns are dealt to neighbouring lanes, 16 bytes each; these lanes are a team. Teams take the keys in turn.
// Each has a softmax of its own over its keys. At the end their sums are brought to one maximum and added up.
#include "config.cuh"
#include "decode_params.cuh"

using namespace config;

constexpr int chunk = 8;  // 8 elements of 16 bits: one 16-byte load
constexpr int lanes = head_dim / chunk;
constexpr int num_threads = num_warps * 32;
constexpr int teams = num_threads / lanes;
constexpr float lowest = -3.0e38f;  // what m begins with: unlike minus infinity, it can be subtracted from itself

FLASHLADDER_KERNEL(attention_decode, DecodeParams,
                   Launch{num_threads, 0, 1, teams}.over("seqlen_q", "num_heads", "batch"));

__device__ void load_chunk(float (&to)[chunk], const dtype *from) {
    const uint4 bits = *reinterpret_cast<const uint4 *>(from);
    const dtype *elements = reinterpret_cast<const dtype *>(&bits);
#pragma unroll
    for (int i = 0; i < chunk; ++i) to[i] = static_cast<float>(elements[i]);
}

extern "C" __global__ void __launch_bounds__(num_threads)
    attention_decode(const __grid_constant__ DecodeParams params) {
    __shared__ float team_m[teams], team_l[teams], team_o[teams][head_dim];

    const int row = blockIdx.x, head = blockIdx.y, batch = blockIdx.z, head_k = head / params.group();
    const int team = threadIdx.x / lanes, column = threadIdx.x % lanes * chunk;
    const int keys = keys_seen<causal>(params.keys_of(batch), row, params.seqlen_q);

    const TensorStride at_q = params.q_stride, at_k = params.k_cache_stride, at_v = params.v_cache_stride;
    const dtype *k = static_cast<const dtype *>(params.k_cache) + batch * at_k.batch + head_k * at_k.head + column;
    const dtype *v = static_cast<const dtype *>(params.v_cache) + batch * at_v.batch + head_k * at_v.head + column;

    float q[chunk], o[chunk] = {};
    float m = lowest, l = 0.0f;  // the running maximum and sum of the team's keys
    load_chunk(q, static_cast<const dtype *>(params.q) + batch * at_q.batch + row * at_q.row + head * at_q.head + column);

    for (int first = 0; first < keys; first += teams) {
        const int key = first + team;
        const bool is_key = key < keys;
        float k_chunk[chunk] = {}, v_chunk[chunk] = {};
        if (is_key) {
            load_chunk(k_chunk, k + key * at_k.row);
            load_chunk(v_chunk, v + key * at_v.row);
        }

        // s = scale * q k, in log2 units: a lane's own columns, then those of the team
        float s = 0.0f;
#pragma unroll
        for (int i = 0; i < chunk; ++i) s += q[i] * k_chunk[i];
#pragma unroll
        for (int lane = 1; lane < lanes; lane *= 2) s += __shfl_xor_sync(0xffffffff, s, lane);
        s = is_key ? s * params.softmax_scale * log2_e : -INFINITY;

        // bring l and o down to the new maximum, and add the key's share
        const float highest = fmaxf(m, s), rescale = exp2f(m - highest), p = exp2f(s - highest);
        m = highest;
        l = l * rescale + p;
#pragma unroll
        for (int i = 0; i < chunk; ++i) o[i] = o[i] * rescale + p * v_chunk[i];
    }

    if (column == 0) team_m[team] = m, team_l[team] = l;
#pragma unroll
    for (int i = 0; i < chunk; ++i) team_o[team][column + i] = o[i];
    __syncthreads();
    if (threadIdx.x >= head_dim) return;

    // A thread a column: the teams' sums, brought to the highest maximum.
    float sum_l = 0.0f, sum_o = 0.0f;
    m = lowest;
    for (int t = 0; t < teams; ++t) m = fmaxf(m, team_m[t]);
    for (int t = 0; t < teams; ++t) {
        const float factor = exp2f(team_m[t] - m);
        sum_l += factor * team_l[t];
        sum_o += factor * team_o[t][threadIdx.x];
    }
    static_cast<dtype *>(params.o)[batch * params.o_stride.batch + row * params.o_stride.row +
                                   head * params.o_stride.head + threadIdx.x] =
        static_cast<dtype>(sum_l > 0.0f ? sum_o / sum_l : 0.0f);
    if (params.lse != nullptr && threadIdx.x == 0)
        params.lse[params.row_index(batch, head, row)] = (m + log2f(sum_l)) / log2_e;
}
