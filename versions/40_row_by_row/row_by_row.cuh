// A deferred softmax that takes a lane's rows one after the other, so that m of a row is read from the registers once.
#pragma once
#include <float.h>

#include "softmax/deferred.cuh"

// P = 2^(unit * S - m) has three operands. The operand cache keeps the last one of each kind and bank: if one row's
// elements follow each other, m stays there, wherever ptxas has put it. Element by element in turns, as the compiler
// would have it, the two m must lie in different banks for that.
template <int rows>
struct RowByRow : DeferredSoftmax<rows> {
    template <int cols>
    __device__ void exponentiate(Accumulator<rows, cols> &s, float (&sum)[rows / 16][2]) {
        float most;  // of the sum of the row before
        this->each_row([&](int b, int h) {
            float &m = this->m[b][h];
            // It stays what it is, as no sum is negative. The compiler cannot know that, so it waits for most of the row
            // before: not for all of it, or the exponentials would pause.
            if (b + h > 0) m = fmaxf(m, fminf(most, -FLT_MAX));
            int seen = 0;
            this->template each_element<cols>(s, b, h, [&](float &x) {
                x = exp2_approx(fmaf(x, this->unit, -m));
                sum[b][h] += x;
                if (++seen == cols / 4 * 3 / 4) most = sum[b][h];
            });
        });
    }
};
