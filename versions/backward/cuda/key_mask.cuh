// Which rows of Q see a key: all, or with a causal mask those from its own position on. Masks are aligned to the bottom
// right, so that the last row sees the last key.
#pragma once
#include "backward_params.cuh"
#include "schedule/l2_sections.cuh"
#include "tile/fragment.cuh"

template <bool causal>
struct KeyMask {
    int seqlen_k, shift, nobody;

    __device__ explicit KeyMask(const BackwardParams &p)
        : seqlen_k(p.seqlen_k), shift(p.seqlen_k - p.seqlen_q), nobody(p.seqlen_q) {}

    // The first row that sees a key. Of a key behind the last one there is none.
    __device__ int first_row(int key) const {
        if (key >= seqlen_k) return nobody;
        return causal ? max(key - shift, 0) : 0;
    }
    // The key behind the last one that a row sees.
    __device__ int end_key(int row) const { return causal ? min(row + shift + 1, seqlen_k) : seqlen_k; }

    // S^T holds the scores of the keys from `first_key` on and the rows from `first_row_` on. Sets to minus infinity those
    // of rows that do not see a key.
    template <int keys, int rows>
    __device__ void hide(Accumulator<keys, rows> &s, int first_key, int first_row_) const {
        if (first_row(first_key + keys - 1) <= first_row_) return;
#pragma unroll
        for (int m = 0; m < keys / 16; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int first = first_row(first_key + m * 16 + h * 8 + accumulator_row()) - first_row_ - accumulator_col();
#pragma unroll
                for (int n = 0; n < rows / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i < first) s.block[m][n][2 * h + i] = -INFINITY;
            }
    }
};

// Which tile of keys of which head of K a CTA has. With a causal mask the first keys are seen by most rows and take
// longest: CTAs begin with those, of all heads of a section. The rows of a section fit into some MB of L2: those of Q and
// dO, and dQ in fp32; of all heads that share one of K, or of one of them.
template <int head_dim, bool by_sections, unsigned l2_megabytes = 24, bool of_all = true>
struct KeyTile {
    static constexpr unsigned l2_rows = (l2_megabytes << 20) / (8 * head_dim);

    int number, head, batch;

    // How many of the heads of K, of all sequences, are in a section.
    __device__ static unsigned section(const BackwardParams &p, unsigned heads) {
        return min(max(l2_rows / (p.seqlen_q * (of_all ? p.num_heads / p.num_heads_k : 1)), 1u), heads);
    }

    __device__ explicit KeyTile(const BackwardParams &p) : number(blockIdx.x), head(blockIdx.y), batch(blockIdx.z) {
        if (!by_sections) return;
        const unsigned heads = gridDim.y * gridDim.z;
        unsigned any_head;
        int from_the_end;
        longest_first(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), gridDim.x, heads, section(p, heads),
                      from_the_end, any_head);
        number = gridDim.x - 1 - from_the_end;
        head = any_head % gridDim.y;
        batch = any_head / gridDim.y;
    }
};
