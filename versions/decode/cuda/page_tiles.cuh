// A ring of tiles of keys that TMA brings box by box: a box lies in one page.
#pragma once
#include "page_ring.cuh"
#include "pipeline/tile_pipeline.cuh"

template <class Tile, class T, int stages>
struct PageTiles : TilePipeline<Tile, T, stages> {
    static constexpr int box_rows = rows_of_box<Tile::rows>(), boxes = Tile::rows / box_rows;
    static constexpr int panels = (Tile::cols + Tile::row_pitch - 1) / Tile::row_pitch;  // that TMA loads
    static_assert(box_rows % 8 == 0 && Tile::rows % box_rows == 0, "a box has whole swizzle patterns");
    static_assert(boxes <= 32, "a lane looks up one box");

    // Starts loading the next tile, once it is empty, by a warp, whose lanes have a box each. Bytes may come before they are
    // expected: the phase also waits for that arrival.
    __device__ void load_boxes(PipelineState<stages> &at, const TensorMapBytes &map, int head, KeyPlace place) {
        Mbarrier &comes = this->full[at.stage];
        this->empty[at.stage].wait(at.parity);
        if (lane_index() == 0) comes.arrive_expecting(panels * Tile::rows * Tile::row_pitch * sizeof(T));
        if (lane_index() < boxes) {
            T *box = this->tiles[at.stage] + Tile::step(lane_index() * box_rows, 0);
#pragma unroll
            for (int panel = 0; panel < panels; ++panel) {
                const int col = panel * Tile::row_pitch;
                tma_load(box + Tile::step(0, col), map, comes, col, place.row, head, place.page);
            }
        }
        at.advance();
    }
};
