// Rows of Q that share the keys of one head of K: those of all heads in its group, packed into one tile.
#pragma once
#include "decode_params.cuh"
#include "ptx/sm80.cuh"
#include "tile/layout.cuh"

// A tile of `rows` packed rows. Packed row i is row i / group of Q, in head i % group of the group.
template <int rows>
struct PackedRows {
    int batch, head_k, first, group, seqlen_q;

    // Tile `tile` of a sequence's packed rows.
    __device__ PackedRows(const DecodeParams &params, int tile, int head_k_, int batch_)
        : batch(batch_), head_k(head_k_), first(tile * rows), group(params.group()), seqlen_q(params.seqlen_q) {}

    __device__ bool has(int i) const { return first + i < group * seqlen_q; }
    // The last one that is there.
    __device__ int last() const { return min(rows, group * seqlen_q - first) - 1; }
    __device__ int row(int i) const { return (first + i) / group; }
    __device__ int head(int i) const { return head_k * group + (first + i) % group; }

    // Keys that packed row i sees, of those that the sequence has.
    template <bool causal>
    __device__ int keys_seen(int keys, int i) const {
        return ::keys_seen<causal>(keys, row(i), seqlen_q);
    }
    // Keys that any row of the tile sees: the last one sees most.
    template <bool causal>
    __device__ int keys_seen(int keys) const {
        return keys_seen<causal>(keys, last());
    }

    // Starts copying the rows to shared memory, by the CTA's first threads. Zeros take the place of rows that are not there.
    template <class Tile, class T>
    __device__ void copy(T *shared, const void *q, TensorStride stride, int threads = blockDim.x) const {
        constexpr int chunk = 8;
        for (int i = threadIdx.x; i < rows * Tile::cols / chunk; i += threads) {
            const int r = i * chunk / Tile::cols, col = i * chunk % Tile::cols;
            cp_async_16_or_zeros(shared_address(shared + Tile::offset(r, col)), element<T>(q, stride, r) + col, has(r));
        }
    }
    // Where packed row i begins in Q or O.
    template <class T>
    __device__ T *element(void *tensor, TensorStride stride, int i) const {
        return static_cast<T *>(tensor) + batch * stride.batch + row(i) * stride.row + head(i) * stride.head;
    }
    template <class T>
    __device__ const T *element(const void *tensor, TensorStride stride, int i) const {
        return element<T>(const_cast<void *>(tensor), stride, i);
    }
};
