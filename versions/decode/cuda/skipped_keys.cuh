// Keys that no row of a sequence sees: padding, and what is before a window. Keys count from the first one behind them.
#pragma once
#include "seen_keys.cuh"

// Rows of a draft tree, (batch, seqlen_q): bit i of a row's mask is set if it sees row i's key, which are the last ones.
template <class Params>
struct Branching : Params {
    const int *tree_mask;
    FLASHLADDER_FURTHER_FIELDS(Params, tree_mask)
};

// How many places of each sequence's cache are padding, before its first key.
template <class Params>
struct Padded : Params {
    const int *cache_leftpad;
    FLASHLADDER_FURTHER_FIELDS(Params, cache_leftpad)
};

using BranchingCache = std::conditional_t<config::tree, Branching<SlopedCache>, SlopedCache>;
using PaddedCache = std::conditional_t<config::leftpad, Padded<BranchingCache>, BranchingCache>;

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
