// Where the keys of a sequence lie: in one piece, or in pages.
#pragma once
#include "splits.cuh"
#include "tile/layout.cuh"

#include <type_traits>

// Keys i * page_size and the next of a sequence are in page block_table[sequence][i].
struct PagedParams : SplitParams {
    const int *block_table;
    int max_pages, page_size, num_pages;
    FLASHLADDER_FURTHER_FIELDS(SplitParams, block_table, max_pages, page_size, num_pages)
};

using CacheParams = std::conditional_t<config::paged, PagedParams, SplitParams>;

// A place in a cache, in pages and rows of a page. Of a cache in one piece, each sequence is a page.
struct KeyPlace {
    int page, row;

    // That of a key before `end`. A page that is none becomes the last one: nothing outside the cache is ever read.
    __device__ static KeyPlace find(const PagedParams &params, int sequence, int key, int end) {
        if (key >= end) return {0, 0};
        const int number = key / params.page_size;
        const unsigned page = params.block_table[sequence * static_cast<long long>(params.max_pages) + number];
        return {static_cast<int>(min(page, static_cast<unsigned>(params.num_pages - 1))), key - number * params.page_size};
    }
    __device__ static KeyPlace find(const SplitParams &, int sequence, int key, int) { return {sequence, key}; }

    // That of another lane's key, whose row of a head begins there.
    template <class T>
    __device__ const T *row_of(int lane, const T *head, TensorStride stride) const {
        const long long page_ = __shfl_sync(0xffffffff, page, lane), row_ = __shfl_sync(0xffffffff, row, lane);
        return head + page_ * stride.batch + row_ * stride.row;
    }
};
