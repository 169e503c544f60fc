// Online softmax where S is transposed: a warpgroup has keys as its rows, and rows of Q as columns. Of each 64 keys a warp
// has 16, so that maxima and sums of a column go through shared memory.
#pragma once
#include "pipeline/roles.cuh"
#include "softmax/log2.cuh"
#include "tile/warpgroup_gemm.cuh"

template <int columns>
struct ColumnExchange {
    float of[4][columns];  // what each warp has
};

// A lane has columns n * 8 + accumulator_col() and the next.
template <int columns>
struct ColumnSoftmax {
    float unit;  // of scores, in log2
    int seen[columns / 8][2];
    float m[columns / 8][2], l[columns / 8][2];  // of l a lane has its own share, until `sum_up`

    // The lowest finite number: unlike minus infinity, it can be subtracted from itself.
    __device__ explicit ColumnSoftmax(float unit_) : unit(unit_) {
        each_column([&](int n, int c) { m[n][c] = -3.0e38f, l[n][c] = 0.0f; });
    }

    __device__ static int column(int n, int c) { return n * 8 + accumulator_col() + c; }
    template <class Column>
    __device__ static void each_column(Column visit) {
#pragma unroll
        for (int n = 0; n < columns / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) visit(n, c);
    }
    // Keys that each of the lane's columns sees.
    __device__ int fewest_seen() const {
        int fewest = seen[0][0];
        each_column([&](int n, int c) { fewest = min(fewest, seen[n][c]); });
        return fewest;
    }

    // -inf for keys that a column does not see. The block of keys begins with `first`.
    template <int count>
    __device__ void hide(Accumulator<16, columns> (&s)[count], int first) const {
        const int key = first + warp_index() * 16 + accumulator_row();
        each(s, [&](float &x, int i, int n, int c, int h) {
            if (key + i * 64 + h * 8 >= seen[n][c]) x = -INFINITY;
        });
    }

    // Takes the next block: raises m to the columns' maxima, brings l and O^T down to it, and turns S^T into P^T.
    // Before `exchange` is used again, the warps must have met.
    template <int count, int panels>
    __device__ void update(Accumulator<16, columns> (&s)[count], Accumulator<16, columns> (&o)[panels],
                           ColumnExchange<columns> &exchange) {
        float highest[columns / 8][2];
        each_column([&](int n, int c) { highest[n][c] = -INFINITY; });
        each(s, [&](float x, int, int n, int c, int) { highest[n][c] = fmaxf(highest[n][c], x); });
        auto higher = [](float a, float b) { return fmaxf(a, b); };
        over_warps(highest, exchange, higher);
        float factor[columns / 8][2];
        each_column([&](int n, int c) {
            const float raised = fmaxf(m[n][c], highest[n][c] * unit);
            factor[n][c] = exp2_approx(m[n][c] - raised);
            m[n][c] = raised, l[n][c] *= factor[n][c];
        });
        each(o, [&](float &x, int, int n, int c, int) { x *= factor[n][c]; });
        each(s, [&](float &x, int, int n, int c, int) {
            x = exp2_approx(x * unit - m[n][c]);
            l[n][c] += x;
        });
    }

    // l of the whole columns, for all lanes.
    __device__ void sum_up(ColumnExchange<columns> &exchange) {
        over_warps(l, exchange, [](float a, float b) { return a + b; });
    }

  private:
    template <int count, class Element>
    __device__ static void each(Accumulator<16, columns> (&s)[count], Element visit) {
#pragma unroll
        for (int i = 0; i < count; ++i)
            each_column([&](int n, int c) {
#pragma unroll
                for (int h = 0; h < 2; ++h) visit(s[i].block[0][n][2 * h + c], i, n, c, h);
            });
    }

    // What lanes have of a column, as one, for all of them.
    template <class Operation>
    __device__ static void over_warps(float (&x)[columns / 8][2], ColumnExchange<columns> &exchange, Operation both) {
        each_column([&](int n, int c) {
#pragma unroll
            for (int lane = 4; lane < 32; lane *= 2) x[n][c] = both(x[n][c], __shfl_xor_sync(0xffffffff, x[n][c], lane));
            if (accumulator_row() == 0) exchange.of[warp_index()][column(n, c)] = x[n][c];
        });
        named_barrier_sync(1, warpgroup_threads);
        each_column([&](int n, int c) {
            x[n][c] = exchange.of[0][column(n, c)];
#pragma unroll
            for (int warp = 1; warp < 4; ++warp) x[n][c] = both(x[n][c], exchange.of[warp][column(n, c)]);
        });
    }
};

// Rounds a warpgroup's P^T, and stores it as P: 64 keys of each of `count` are 64 columns of the tile.
template <class Tile, class T, int columns, int count>
__device__ inline void store_transposed(T *tile, const Accumulator<16, columns> (&p)[count]) {
    const int row = lane_index() % 8, col = warp_index() * 16 + lane_index() / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < count; ++i)
#pragma unroll
        for (int n = 0; n < columns / 8; ++n) {
            const float (&block)[4] = p[i].block[0][n];
            stmatrix_x2_trans(shared_address(tile + Tile::offset(n * 8 + row, i * 64 + col)), pack<T>(block[0], block[1]),
                              pack<T>(block[2], block[3]));
        }
}
