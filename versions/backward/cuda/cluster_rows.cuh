// A ring of tiles of Q or dO in each CTA of a cluster. All need the same tiles, so each loads some rows of a tile for all.
#pragma once
#include "ptx/multicast.cuh"
#include "row_pipeline.cuh"
#include "tile/layout.cuh"

template <class Tile, class T, int stages, int ctas>
struct ClusterRows : RowPipeline<Tile, T, stages> {
    using Alone = RowPipeline<Tile, T, stages>;
    static constexpr int rows = Tile::rows / ctas;  // that a CTA loads

    __device__ void init(int consumer_warps) { Alone::init(consumer_warps * ctas); }
    // Starts loading this CTA's rows of a tile that begins at `row`, and its own numbers, once the place is empty in all CTAs.
    __device__ void load(const typename Alone::State &at, const TensorMapBytes &map, int row, int head, int batch,
                         const float *of_rows) {
        if constexpr (ctas == 1) {
            Alone::load(at, map, row, head, batch, of_rows);
        } else {
            Mbarrier &loaded = this->full[at.stage];
            const int first = cluster_rank() * rows;
            wait_for_cluster(this->empty[at.stage], at.parity);
            loaded.arrive_expecting(Tile::size * sizeof(T));  // all rows
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel)
                tma_load_multicast(this->tiles[at.stage] + Tile::step(first, panel * 64), map, loaded, panel * 64, row + first,
                                   head, batch, (1 << ctas) - 1);
            loaded.arrive_expecting(sizeof this->numbers[0]);
            bulk_load(this->numbers[at.stage], of_rows, sizeof this->numbers[0], loaded);
        }
    }
    // All lanes of the warp have read their numbers, and are together again.
    __device__ void release(int stage) {
        if constexpr (ctas == 1)
            Alone::release(stage);
        else if (lane_index() < ctas)
            arrive_at(this->empty[stage], lane_index());
    }
};
