// Copies blocks of K and V into shared memory by panels, with any row strides.
#pragma once
#include "24_woven_general/narrower.cuh"

// Copies blocks of K and V as StageCopier does: from the last to the first, and each block from its last rows to its
// first. So one pointer into each tensor runs backwards through it. Unlike StageCopier it copies by panels, and takes
// any row strides. V may have fewer columns.
template <class KTile, class VTile, int num_warps, class T, class Columns>
struct PanelStageCopier {
    template <class Tile>
    using Whole = PanelCopier<Tile, num_warps, T, Columns>;
    static constexpr int rows_per_step = Whole<KTile>::rows_per_step, steps = KTile::rows / rows_per_step;

    Columns of_k, of_v;
    uint32_t to_k, to_v;  // where the next block is to lie
    const char *k, *v;
    int k_step, v_step;  // bytes; 64 bits would take two registers each, and many more instructions

    __device__ void start(T *shared_k, T *shared_v, long long k_row_stride, long long v_row_stride) {
        to_k = shared_address(shared_k + KTile::offset(Whole<KTile>::row(), Whole<KTile>::col()));
        to_v = shared_address(shared_v + VTile::offset(Whole<VTile>::row(), Whole<VTile>::col()));
        k_step = static_cast<int>(rows_per_step * sizeof(T) * k_row_stride);  // the host takes no stride that does not fit
        v_step = static_cast<int>(rows_per_step * sizeof(T) * v_row_stride);
    }
    // Copies block `block`, of which the first `rows` are there, to so many bytes from where the next block is to lie.
    __device__ void copy_block(const T *k_, const T *v_, int block, int rows, int k_shift, int v_shift) {
        copy_first_rows<KTile>(of_k, to_k + k_shift, k, k_, k_step, block, rows);
        copy_first_rows<VTile>(of_v, to_v + v_shift, v, v_, v_step, block, rows);
    }
    // Copies piece number `piece` of the next block, which has `pieces` of them.
    template <int pieces>
    __device__ void copy(int piece) {
        constexpr int count = steps / pieces;
        copy_steps<KTile, count>(of_k, to_k, piece, k, k_step);
        copy_steps<VTile, count>(of_v, to_v, piece, v, v_step);
        keep_in_place(k, v);
    }
    // The same, woven into `count` steps of something else, of which this is step t.
    template <int pieces>
    __device__ void copy_part(int t, int count) {
        if (t % (count / pieces) == 0) copy<pieces>(t / (count / pieces));
    }

  private:
    template <class Tile>
    __device__ void copy_first_rows(const Columns &columns, uint32_t tile, const char *&from, const T *tensor, int step,
                                    int block, int rows) const {
        Whole<Tile> copier{columns};
        copier.to = tile;
        copier.from = reinterpret_cast<const char *>(tensor + Whole<Tile>::col());
        copier.row_bytes = step / rows_per_step;
        copier.copy_rows(block, rows);
        from = copier.from + static_cast<long long>(block * Tile::rows - rows_per_step + Whole<Tile>::row()) * copier.row_bytes;
    }
    template <class Tile, int count>
    __device__ void copy_steps(const Columns &columns, uint32_t tile, int piece, const char *&from, int step) const {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            Whole<Tile>::each_panel([&](int panel) {
                const uint32_t shared = tile + Tile::step((steps - 1 - piece * count - i) * rows_per_step, panel * 64) * sizeof(T);
                copy_columns(columns, shared, from + panel * 64 * sizeof(T), panel * 64 + Whole<Tile>::col());
            });
            from -= step;
        }
    }
};
