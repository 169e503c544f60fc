// The rows of a batch of sequences of one length, each padded to whole tiles.
#pragma once
#include "prepare_tile.cuh"

FLASHLADDER_WORKSPACE(lse_log2, float, "batch * num_heads * cdiv(seqlen_q, block_m) * block_m");
FLASHLADDER_WORKSPACE(delta, float, "batch * num_heads * cdiv(seqlen_q, block_m) * block_m");
FLASHLADDER_WORKSPACE(dq_sum, float, "batch * num_heads * cdiv(seqlen_q, block_m) * block_m * head_dim");

// The first row of a tile among the padded rows of all heads.
__device__ inline long long padded_row(const BackwardParams &p, int batch, int head, int tile) {
    const int tiles = (p.seqlen_q + config::block_m - 1) / config::block_m;
    return ((static_cast<long long>(batch) * p.num_heads + head) * tiles + tile) * config::block_m;
}

// A sequence of the batch, and where its rows are.
struct BatchRows {
    static constexpr bool has_dsinks = false;
    const BackwardParams &p;
    int batch = blockIdx.z;

    __device__ explicit BatchRows(const BackwardParams &p_) : p(p_) {}

    __device__ int rows() const { return p.seqlen_q; }
    __device__ long long padded_row(int head, int tile) const { return ::padded_row(p, batch, head, tile); }
    template <class T>
    __device__ T *like_q(T *tensor, const TensorStride &stride, int head) const {
        return head_of(tensor, stride, batch, head);
    }
    __device__ const float *like_lse(const float *numbers, int head) const {
        return numbers + (static_cast<long long>(batch) * p.num_heads + head) * p.seqlen_q;
    }
    __device__ const float *dlse(int) const { return nullptr; }      // lse has no gradient
    __device__ void pull_sink(int, int, float, float) const {}       // nor have sinks
};

__device__ inline void prepare_tile(const BackwardParams &p, const PaddedWorkspaces &workspaces) {
    prepare_tile(BatchRows{p}, workspaces);
}
