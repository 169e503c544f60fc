// An anchored softmax whose exponentials can be woven into a product, part after part.
#pragma once
#include "18_anchored_softmax/anchored_softmax.cuh"

struct AsItIs {
    __device__ float operator()(float x) const { return x; }
};

template <class T, int rows>
struct WovenSoftmax : AnchoredSoftmax<T, rows> {
    // Turns one part of a chunk of S into an operand of P V: number `part` of `parts`. Chunk `chunk` has the 16 columns
    // from 16 * chunk on. score(x) is what an element of S counts.
    template <int cols, class Score = AsItIs>
    __device__ void add_part(const Accumulator<rows, cols> &s, HeldA<rows, cols> &p, int chunk, int part, int parts,
                             Score score = {}) {
        constexpr int pairs = rows / 4;  // of a lane's elements in a chunk
#pragma unroll
        for (int pair = part * pairs / parts; pair < (part + 1) * pairs / parts; ++pair) {
            const int b = pair / 4, i = pair % 4, h = i % 2;
            const float (&block)[4] = s.block[b][chunk * 2 + i / 2];
            const float left = exp2_approx(score(block[2 * h]) * this->unit - this->m[b][h]);
            const float right = exp2_approx(score(block[2 * h + 1]) * this->unit - this->m[b][h]);
            this->l[b][h] += left + right;
            p.block[chunk][b][i] = pack<T>(left, right);
        }
    }
};
