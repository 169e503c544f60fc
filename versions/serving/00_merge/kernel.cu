// Partial results of attention into one: of each row O is the sum of both sides, weighted by their log-sum-exps. A thread
// has 8 columns of a row. What a side without keys holds is not read.
#include "config.cuh"
#include "launch.cuh"
#include "ptx/sm80.cuh"
#include "softmax/log2.cuh"

#include <type_traits>

using namespace config;

constexpr int num_threads = 256, columns = 8;

// O of a side is (batch, seqlen_q, num_heads, head_dim), its log-sum-exp (batch, num_heads, seqlen_q) or, rows first, (batch,
// seqlen_q, num_heads). Stacked, the rows of side a are all sides of one row, and there is no side b.
struct MergeParams {
    const void *o_a;
    void *o;
    const float *lse_a;
    float *lse;
    TensorStride o_a_stride, o_stride;
    int batch, seqlen_q, num_heads, head_dim, a_rows_first;
    FLASHLADDER_FIELDS(o_a, o, lse_a, lse, o_a_stride, o_stride, batch, seqlen_q, num_heads, head_dim, a_rows_first)

    // The place of a row in a log-sum-exp of so many rows.
    __device__ long long row_index(int sequence, int row, int head, int rows, bool rows_first) const {
        const long long at = static_cast<long long>(sequence) * rows * num_heads;
        return at + (rows_first ? row * num_heads + head : head * rows + row);
    }
};

struct PairParams : MergeParams {
    const void *o_b;
    const float *lse_b;
    TensorStride o_b_stride;
    int b_rows_first;
    FLASHLADDER_FURTHER_FIELDS(MergeParams, o_b, lse_b, o_b_stride, b_rows_first)
};
using Params = std::conditional_t<stacked, MergeParams, PairParams>;

// 8 columns of a row, as fp32.
struct Columns {
    float x[columns];

    template <class T>
    __device__ static Columns load(const void *tensor, TensorStride stride, int sequence, int row, int head, int column) {
        const T *from = static_cast<const T *>(tensor) + sequence * stride.batch + row * stride.row + head * stride.head;
        alignas(16) T elements[columns];
        constexpr int pieces = sizeof(elements) / 16;
#pragma unroll
        for (int i = 0; i < pieces; ++i)
            reinterpret_cast<uint4 *>(elements)[i] = reinterpret_cast<const uint4 *>(from + column)[i];
        Columns made;
#pragma unroll
        for (int i = 0; i < columns; ++i) made.x[i] = static_cast<float>(elements[i]);
        return made;
    }
    template <class T>
    __device__ void store(void *tensor, TensorStride stride, int sequence, int row, int head, int column) const {
        T *to = static_cast<T *>(tensor) + sequence * stride.batch + row * stride.row + head * stride.head;
        alignas(16) T elements[columns];
#pragma unroll
        for (int i = 0; i < columns; ++i) elements[i] = static_cast<T>(x[i]);
        constexpr int pieces = sizeof(elements) / 16;
#pragma unroll
        for (int i = 0; i < pieces; ++i)
            reinterpret_cast<uint4 *>(to + column)[i] = reinterpret_cast<const uint4 *>(elements)[i];
    }
};

using First = std::conditional_t<wide, float, dtype>;  // elements of side a, and of O

// A side's log-sum-exp of a row, and 8 columns of its O. Of a side without keys the first is -inf, also where it is +inf.
template <class Params>
struct Side {
    const Params &params;
    int sequence, row, head, number;

    __device__ bool is_first() const { return stacked || number == 0; }
    __device__ int own_row() const { return stacked ? number : row; }
    __device__ float lse() const {
        const float *from = params.lse_a;
        bool rows_first = params.a_rows_first;
        if constexpr (!stacked)
            if (!is_first()) from = params.lse_b, rows_first = params.b_rows_first;
        const float found = from[params.row_index(sequence, own_row(), head, params.seqlen_q, rows_first)];
        return found == INFINITY ? -INFINITY : found;
    }
    __device__ Columns o(int column) const {
        if constexpr (!stacked)
            if (!is_first()) return Columns::load<dtype>(params.o_b, params.o_b_stride, sequence, row, head, column);
        return Columns::load<First>(params.o_a, params.o_a_stride, sequence, own_row(), head, column);
    }
};

FLASHLADDER_KERNEL(attention_merge, Params,
                   Launch{num_threads, 0, 1, 1}.over("cdiv(batch * rows * num_heads * head_dim, 2048)", "1", "1"));

extern "C" __global__ void __launch_bounds__(num_threads) attention_merge(const __grid_constant__ Params params) {
    const int rows = stacked ? 1 : params.seqlen_q, sides = stacked ? params.seqlen_q : 2;
    const int chunks = params.head_dim / columns;
    long long i = static_cast<long long>(blockIdx.x) * num_threads + threadIdx.x;
    const int column = i % chunks * columns;
    i /= chunks;
    const int head = i % params.num_heads;
    i /= params.num_heads;
    const int row = i % rows, sequence = i / rows;
    if (sequence >= params.batch) return;

    float highest = -3.0e38f, sum = 0.0f;
    for (int side = 0; side < sides; ++side) highest = fmaxf(highest, Side<Params>{params, sequence, row, head, side}.lse());
    Columns o{};
    for (int number = 0; number < sides; ++number) {
        const Side<Params> side{params, sequence, row, head, number};
        const float lse = side.lse();
        if (lse == -INFINITY) continue;
        const float weight = exp2f((lse - highest) * log2_e);
        const Columns of_side = side.o(column);
        sum += weight;
#pragma unroll
        for (int c = 0; c < columns; ++c) o.x[c] += weight * of_side.x[c];
    }
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int c = 0; c < columns; ++c) o.x[c] *= inverse;
    o.store<First>(params.o, params.o_stride, sequence, row, head, column);
    if (column == 0)
        params.lse[params.row_index(sequence, row, head, rows, params.a_rows_first)] = highest + logf(sum);
}
