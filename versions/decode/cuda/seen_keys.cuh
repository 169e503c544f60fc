// Which keys rows see, and how: within a window, with a softcap or ALiBi.
#pragma once
#include "decode_softmax.cuh"
#include "pages.cuh"
#include "softmax/softcap.cuh"

// As in softmax/softcap.cuh. C++ puts the first field into the gap at the end of Params, where there is one.
template <class Params>
struct BoundedKeys : Params {
    int window_left, window_right;
    float softcap;
    constexpr auto fields() const {
        const auto before = Params::fields();
        return before.with(listed(before.end, "window_left, window_right, softcap", window_left, window_right, softcap));
    }
};

// ALiBi's slopes, (batch, num_heads) fp32, contiguous.
template <class Params>
struct Sloped : Params {
    const float *alibi_slopes;
    FLASHLADDER_FURTHER_FIELDS(Params, alibi_slopes)
};

using BoundedCache = std::conditional_t<config::window || config::softcap, BoundedKeys<CacheParams>, CacheParams>;
using SlopedCache = std::conditional_t<config::alibi, Sloped<BoundedCache>, BoundedCache>;

// What packed rows of a tile see.
template <class Params, class Tile>
struct SeenKeys {
    const Params &params;
    const Tile &tile;
    int keys;  // of the sequence

    __device__ SeenKeys(const Params &params_, const Tile &tile_, int keys_)
        : params(params_), tile(tile_), keys(keys_) {}
    __device__ SeenKeys(const Params &params_, const Tile &tile_)
        : SeenKeys(params_, tile_, params_.keys_of(tile_.batch)) {}

    // The row's own key, which may be before the first one. Masks are aligned to the end.
    __device__ int own(int i) const { return keys - tile.seqlen_q + tile.row(i); }
    __device__ int first(int i) const {
        if constexpr (config::window) return max(0, own(i) - params.window_left);
        return 0;
    }
    // The key behind the last one.
    __device__ int end(int i) const {
        if constexpr (config::causal) return max(0, min(own(i), keys - 1) + 1);
        if constexpr (config::window) return max(0, min(own(i) + params.window_right, keys - 1) + 1);
        return keys;
    }
};

// The same of a lane's two rows.
struct LaneSees {
    int first[2], end[2];
    int tree_begin;
    unsigned tree[2];

    template <class SeenByTile>
    __device__ explicit LaneSees(const SeenByTile &seen) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = h * 8 + accumulator_row();
            first[h] = seen.first(i), end[h] = seen.end(i);
            if constexpr (config::tree)
                tree[h] = seen.params.tree_mask[seen.tile.batch * seen.tile.seqlen_q + min(seen.tile.row(i), seen.tile.seqlen_q - 1)];
        }
        if constexpr (config::tree) tree_begin = seen.keys - seen.tile.seqlen_q;
    }
    // -inf in S, which begins with key `at`, where a row does not see a key.
    template <int keys>
    __device__ void hide(Accumulator<16, keys> &s, int at) const {
        if (at + keys > min(end[0], end[1])) DecodeSoftmax::hide(s, at, end);
        if constexpr (config::tree)
            if (at + keys > tree_begin) hide_other_branches(s, at);
        if (!config::window || at >= max(first[0], first[1])) return;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (at + n * 8 + accumulator_col() + i % 2 < first[i / 2]) s.block[0][n][i] = -INFINITY;
    }

  private:
    template <int keys>
    __device__ void hide_other_branches(Accumulator<16, keys> &s, int at) const {
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int node = at + n * 8 + accumulator_col() + i % 2 - tree_begin;
                if (node >= 0 && !(tree[i / 2] >> min(node, 31) & 1)) s.block[0][n][i] = -INFINITY;
            }
    }
};

// ALiBi: a score loses a slope for each key between a row's own and its own (Press et al., arXiv:2108.12409).
struct LaneBias {
    float slope[2];
    int own[2];

    // An element of S counts `unit` in log2.
    template <class SeenByTile>
    __device__ LaneBias(const SeenByTile &seen, float unit) {
        if constexpr (config::alibi)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = h * 8 + accumulator_row();
                const int at = seen.tile.batch * seen.params.num_heads + seen.tile.head(i);
                slope[h] = seen.params.alibi_slopes[at] * log2_e / unit;
                own[h] = seen.own(i);
            }
    }
    // S begins with key `at`.
    template <int keys>
    __device__ void add(Accumulator<16, keys> &s, int at) const {
        if constexpr (config::alibi)
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = at + n * 8 + accumulator_col() + i % 2;
                    s.block[0][n][i] -= slope[i / 2] * fabsf(own[i / 2] - key);
                }
    }
};
