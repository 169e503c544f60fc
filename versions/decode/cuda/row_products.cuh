// Products of a warp's 16 packed rows with a block of keys that all warps of a CTA share: S = Q K^T and O += P V. Caches are
// of 16 bits or of 8, whose scales come in here: what multiplies S and O.
#pragma once
#include "epilogue/store.cuh"
#include "fp8_operands.cuh"
#include "fp8_scales.cuh"
#include "warp_sums.cuh"

template <class QTile, int block_n, int copied, bool fp8 = config::fp8_cache>
struct RowProducts {
    static constexpr int cols = QTile::cols;
    using Cached = config::dtype;
    using Element = config::dtype;  // of a tile in shared memory
    using Tile = SwizzledPanels<block_n, cols>;
    using Softmax = DecodeSoftmax;
    static constexpr int scales_bytes = 0;  // of a stage

    QOperand<16, cols, cols <= 128 ? 0 : 2, HoistedReader<QTile, Element>, 1> q;
    KOperand<block_n, cols, 2, HoistedReader<Tile, Element, ByRow>> k;
    VOperand<cols, block_n, 2, HoistedReader<Tile, Element>> v;

    template <class Params>
    __device__ RowProducts(const Params &, int, int, char *) {}
    __device__ void take_rows(const Element *tile, int first) { q.start(tile, first); }
    __device__ void copy_scales(int, int, int, bool) const {}

    // K and V of a block follow each other in memory.
    __device__ void scores(Accumulator<16, block_n> &s, const Element *tiles, int) {
        k.reader.start(tiles);
        v.reader.start(tiles + Tile::size);
        s.clear();
        gemm<Element, cols>(s, q, k);
    }
    __device__ void add(Accumulator<16, cols> &o, Accumulator<16, block_n> &p, int) {
        auto rounded = round_to_operand<Element>(p);
        gemm<Element, block_n>(o, rounded, v);
    }
    __device__ void scale_sum(Accumulator<16, cols> &) const {}

    static __device__ void store(config::dtype *shared, int first, const Accumulator<16, cols> &o) {
        store_to_shared<QTile>(shared, first, o);
    }
    // The lane's columns of row h.
    static __device__ void put(const Accumulator<16, cols> &o, int h, float *row) { put_two_columns(o, h, row); }
};

// An element is a pair of columns.
template <class QTile, int block_n, int copied>
struct RowProducts<QTile, block_n, copied, true> {
    static constexpr int cols = QTile::cols;
    using Cached = uint8_t;
    using Element = uint16_t;
    using Tile = SwizzledPanels<block_n, cols / 2>;
    using Softmax = Fp8Softmax;
    using Scales = WarpScales<block_n, config::page_scales, copied>;
    static constexpr int scales_bytes = Scales::stage_size * sizeof(float);

    static constexpr bool held = cols <= 128;
    std::conditional_t<held, Fp8QOperand<cols>, Fp8StreamedQ<cols, QTile, config::dtype>> q;
    Fp8KOperand<block_n, cols, Tile> k;
    Fp8VOperand<cols, block_n, Tile> v;
    Scales scales;

    template <class Params>
    __device__ RowProducts(const Params &params, int sequence, int head_k, char *ring)
        : scales(params, sequence, head_k, reinterpret_cast<float *>(ring)) {}
    __device__ void take_rows(config::dtype *tile, int first) {
        if constexpr (held)
            q.template start<QTile>(tile + QTile::step(first, 0));
        else
            q.start(tile + QTile::step(first, 0));
    }
    // Those of the lane's key, which the block has from `first` on.
    __device__ void copy_scales(int stage, int first, int page, bool is_there) const {
        scales.copy(stage, page, is_there, first);
    }
    __device__ void scores(Accumulator<16, block_n> &s, const Element *tiles, int stage) {
        k.start(tiles);
        v.start(tiles + Tile::size);
        s.clear();
        gemm<__half, cols>(s, q, k);
        each_row([&](int h) { scale_row(s, h, q.unit[h] * scales.k_unit); });
        scales.scale_scores(stage, s);
    }
    __device__ void add(Accumulator<16, cols> &o, Accumulator<16, block_n> &p, int stage) {
        scales.scale_weights(stage, p, o);
        auto rounded = round_to_operand<__half>(p);
        gemm<__half, block_n>(o, rounded, v);
    }
    __device__ void scale_sum(Accumulator<16, cols> &o) const { scales.scale_sum(o); }

    static __device__ void store(config::dtype *shared, int first, const Accumulator<16, cols> &o) {
        each_row([&](int h) {
            const int row = first + h * 8 + accumulator_row();
            each_four_columns(o, h, [&](int col, float4 x) { store_rounded(shared + QTile::offset(row, col), x); });
        });
    }
    static __device__ void put(const Accumulator<16, cols> &o, int h, float *row) { put_columns(o, h, row); }
};
