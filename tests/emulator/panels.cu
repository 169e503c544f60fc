// A tile that TMA loads in panels of 64, 32 or 16 columns, with ones behind it: where its elements lie, and its products.
#include "48_column_of_ones/column_of_ones.cuh"
#include "pipeline/tma.cuh"
#include "tile/warpgroup_gemm.cuh"

using dtype = __nv_bfloat16;
constexpr int rows = 32, cols = 96;
template <int panel_cols>
using Tile = WithOnes<SwizzledPanels<rows, cols, panel_cols>>;

struct Maps { TensorMapBytes of_64, of_32, of_16; };
struct Shared {
    alignas(1024) dtype of_64[1][Tile<64>::size];
    alignas(1024) dtype of_32[1][Tile<32>::size];
    alignas(1024) dtype of_16[1][Tile<16>::size];
    Mbarrier full[3];
};
struct Found {
    float memory[Tile<64>::size];  // as the tile lies there
    float elements[rows * cols];
    float by_columns[warpgroup_rows][cols + ones_columns], by_rows[warpgroup_rows][rows];  // A B
};

// A of a warp, of the first k of its columns.
template <int k>
__device__ inline HeldA<16, k> held(const dtype *a) {
    HeldA<16, k> held;
    for (int step = 0; step < k / 16; ++step)
        for (int i = 0; i < 4; ++i) {
            const int row = warp_index() * 16 + accumulator_row() + i % 2 * 8;
            const int col = step * 16 + accumulator_col() + i / 2 * 8;
            held.block[step][0][i] = *reinterpret_cast<const uint32_t *>(a + row * cols + col);
        }
    return held;
}

template <int n, int k, class B>
__device__ inline void multiply(float (&found)[warpgroup_rows][n], HeldA<16, k> a, const B &b) {
    Accumulator<16, n> c;
    c.clear();
    start_sum<dtype>(c, a, b);
    wait_for(c, a);
    for (int block = 0; block < n / 8; ++block)
        for (int i = 0; i < 4; ++i)
            found[warp_index() * 16 + accumulator_row() + i / 2 * 8][block * 8 + accumulator_col() + i % 2] =
                c.block[0][block][i];
}

template <class Tile>
__device__ inline void find(Found &found, dtype (&tiles)[1][Tile::size], const TensorMapBytes &map, Mbarrier &full, const dtype *a) {
    if (threadIdx.x == 0) {
        full.init(1);
        fence_mbarrier_init();
    }
    write_ones<Tile>(tiles);
    __syncthreads();
    if (threadIdx.x == 0) load_tile<Tile>(tiles[0], map, full, 0, 0, 0);
    full.wait(0);
    for (int i = threadIdx.x; i < Tile::size; i += blockDim.x) found.memory[i] = tiles[0][i];
    for (int i = threadIdx.x; i < rows * cols; i += blockDim.x) found.elements[i] = tiles[0][Tile::offset(i / cols, i % cols)];
    ByColumns<Tile> columns;
    columns.start(tiles[0]);
    multiply(found.by_columns, held<rows>(a), columns);
    ByRows<Tile> b_rows;
    b_rows.start(tiles[0]);
    multiply(found.by_rows, held<cols>(a), b_rows);
}

extern "C" __global__ void __launch_bounds__(warpgroup_threads)
    kernel(const __grid_constant__ Maps maps, const dtype *a, Found *found) {
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    find<Tile<64>>(found[0], shared.of_64, maps.of_64, shared.full[0], a);
    find<Tile<32>>(found[1], shared.of_32, maps.of_32, shared.full[1], a);
    find<Tile<16>>(found[2], shared.of_16, maps.of_16, shared.full[2], a);
}
