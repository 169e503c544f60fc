// Which keys rows see, and how: behind padding, within a window, with a softcap or ALiBi. Keys of a sequence count from
// the first one that any of its rows sees.
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

// How many places of each sequence's cache are padding, before its first key.
template <class Params>
struct Padded : Params {
    const int *cache_leftpad;
    FLASHLADDER_FURTHER_FIELDS(Params, cache_leftpad)
};

using BoundedCache = std::conditional_t<config::window || config::softcap, BoundedKeys<CacheParams>, CacheParams>;
using SlopedCache = std::conditional_t<config::alibi, Sloped<BoundedCache>, BoundedCache>;
using PaddedCache = std::conditional_t<config::leftpad, Padded<SlopedCache>, SlopedCache>;

template <class Params>
struct Seen : Params {
    // The place in the cache of the first key that a row of the sequence sees: the first row sees furthest back.
    __device__ int first_key(int sequence) const {
        const int keys = Params::keys_of(sequence);
        int first = 0;
        if constexpr (config::leftpad) first = max(first, Params::cache_leftpad[sequence]);
        if constexpr (config::window) first = max(first, keys - Params::seqlen_q - Params::window_left);
        return min(first, keys);
    }
    // The keys from there on.
    __device__ int keys_of(int sequence) const { return Params::keys_of(sequence) - first_key(sequence); }
};
using SeenParams = Seen<PaddedCache>;

// What packed rows of a tile see.
template <class Params, class Tile>
struct SeenKeys {
    const Params &params;
    const Tile &tile;
    int keys;  // of the sequence

    __device__ SeenKeys(const Params &params_, const Tile &tile_)
        : params(params_), tile(tile_), keys(params.keys_of(tile.batch)) {}

    // The row's own key, which may be before the first one. Masks are aligned to the end.
    __device__ int own(int i) const { return keys - params.seqlen_q + tile.row(i); }
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

    template <class SeenByTile>
    __device__ explicit LaneSees(const SeenByTile &seen) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = h * 8 + accumulator_row();
            first[h] = seen.first(i), end[h] = seen.end(i);
        }
    }
    // -inf in S, which begins with key `at`, where a row does not see a key.
    template <int keys>
    __device__ void hide(Accumulator<16, keys> &s, int at) const {
        if (at + keys > min(end[0], end[1])) DecodeSoftmax::hide(s, at, end);
        if (!config::window || at >= max(first[0], first[1])) return;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (at + n * 8 + accumulator_col() + i % 2 < first[i / 2]) s.block[0][n][i] = -INFINITY;
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
