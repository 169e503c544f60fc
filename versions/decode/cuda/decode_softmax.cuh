// Online softmax of a warp's 16 packed rows, some of which may see none of its keys.
#pragma once
#include "softmax/online.cuh"

struct DecodeSoftmax : OnlineSoftmax<16> {
    // The lowest finite number: unlike minus infinity, it can be subtracted from itself.
    __device__ explicit DecodeSoftmax(float unit_) {
        unit = unit_;
        clear();
        m[0][0] = m[0][1] = -3.0e38f;
    }

    // Hides the keys from seen[h] on of row h: -inf in S. The block of keys begins with `first`.
    template <int keys>
    __device__ static void hide(Accumulator<16, keys> &s, int first, const int (&seen)[2]) {
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + n * 8 + accumulator_col() + i % 2 >= seen[i / 2]) s.block[0][n][i] = -INFINITY;
    }
};
