// Parts of about as many keys each, from sequences of any lengths.
#pragma once
#include "splits.cuh"

// The part of a sequence that a CTA has: blocks of keys of it.
struct Part {
    int sequence;  // -1: there are fewer parts
    int blocks;    // of the sequence
    int split, count, first;  // its number among the sequence's, how many these are, and the first one's among all

    // Its first block, or, with 1, the block behind its last one.
    __device__ int first_block(int next) const {
        return static_cast<int>(static_cast<long long>(blocks) * (split + next) / count);
    }
    __device__ Parts all() const { return {first, 1, count}; }
};

// A part, by a warp, whose lanes look at the lengths of 32 sequences at a time. All keys are to make target_parts parts; a
// sequence has as many as it needs for none to be larger, and one where it has no keys. Without a target, it has num_splits.
// As each may have a part that is smaller, these can be more than the target: with `at_most`, parts of up to 32 sequences grow
// until they are not.
// `lane_of(first, count, end)` says which lane has the sequence, from 32 on: none of sequences `first` and the next. The
// lane's sequence has `count` parts, and `end` are these and all before them. params.keys_of says how many keys it has.
template <int block_n, bool at_most = false, class Params, class LaneOf>
__device__ inline Part scan_parts(const Params &params, LaneOf lane_of) {
    auto blocks_of = [&](int sequence) {
        return sequence < params.batch ? (params.keys_of(sequence) + block_n - 1) / block_n : 0;
    };
    int a_part = 0;
    if (params.target_parts > 0) {
        int all = 0, latest = 0;
#pragma unroll 4  // lengths of 128 sequences are on their way at once
        for (int first = 0; first < params.batch; first += 32) all += latest = blocks_of(first + lane_index());
        a_part = max(1, (warp_sum(all) + params.target_parts - 1) / params.target_parts);
        if (at_most && params.batch > 1 && params.batch <= min(32, params.target_parts)) {
            auto parts = [&] { return warp_sum(lane_index() < params.batch ? max(1, (latest + a_part - 1) / a_part) : 0); };
            while (parts() > params.target_parts) a_part += 1 + a_part / 16;  // few steps, and little more than is needed
        }
    }
    int parts_before = 0;
    for (int first = 0; first < params.batch; first += 32) {
        const int sequence = first + lane_index(), blocks = blocks_of(sequence);
        int count = a_part ? max(1, (blocks + a_part - 1) / a_part) : params.num_splits;
        if (sequence >= params.batch) count = 0;
        int end = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffff, end, step);
            if (lane_index() >= step) end += other;
        }
        end += parts_before;
        const int lane = lane_of(first, count, end);
        if (lane < 32) {
            count = __shfl_sync(0xffffffff, count, lane);
            return {first + lane, __shfl_sync(0xffffffff, blocks, lane), 0, count,
                    __shfl_sync(0xffffffff, end, lane) - count};
        }
        parts_before = __shfl_sync(0xffffffff, end, 31);
    }
    return {-1, 0, 0, 0, 0};
}

// Part `number` of all.
template <int block_n, bool at_most = false, class Params>
__device__ inline Part find_part(const Params &params, int number) {
    Part part = scan_parts<block_n, at_most>(params, [&](int, int, int end) {
        return __popc(__ballot_sync(0xffffffff, end <= number));  // so many sequences end before the part
    });
    part.split = number - part.first;
    return part;
}
