// Rows of the cache lie in shared memory as they come, in 8 bits. They become 16-bit numbers in the registers of whoever
// multiplies with them: as A operands, so that S and O are transposed. A CTA has teams of eight warps, which have blocks in
// turn; four more warps copy rows. Of a block a team's warp has
//
//     32 keys and 144 columns of S^T = K Q^T
//     some rows of the softmax
//     64 columns of V, which are rows of O^T += V^T P^T
//
// The barriers:
//
//     ring         full: a block's rows have come. empty: its team is done with them
//     has_scores   of a team: what its warps have of S is there, and they are done with P of the block before
//     has_p        of a team: P, and by what O is to be multiplied
//     all_done     of the teams: no block is read any more, and sums are there; then: the other team's O is
#include "combine_in_time.cuh"
#include "config.cuh"
#include "decode/cuda/equal_parts.cuh"
#include "latents.cuh"
#include "pipeline/roles.cuh"
#include "raw_rows.cuh"

using namespace config;

constexpr int rows = block_m, eights = rows / 8;       // packed rows
constexpr int team_warps = 8, teams = rows <= 16 ? 2 : 1;  // with 32 rows registers are for one team
constexpr int team_threads = teams * team_warps * 32;  // of all; then come the warps that copy
constexpr int col_slices = 4, slice_steps = 128 / 16 + 1;  // of S's columns: 128 in 8 bits, one scale's, and 16 in 16 bits
constexpr int own_rows = rows / team_warps;            // of the softmax, a warp's
constexpr int own_cols = head_dim_v / team_warps;      // of O
constexpr bool one_wave = true;  // an SM has room for one CTA: one part more than SMs would take as long again

constexpr int all_done = 1, has_scores = 2, has_p = has_scores + teams;

// What the warps of a team pass to each other. Rows are so far apart that eight begin in other banks.
struct Passed {
    alignas(16) __half p[col_slices][rows][block_n + 8];  // times the scale of each slice's columns
    float s[col_slices][rows][block_n + 4];              // the products of each
    alignas(16) float unit[rows][col_slices];  // of these products, for powers of two
    float factor[rows];
    int unseen[rows];  // of the part's last keys, where rows differ in that
};
struct Sum { float m, l; };

using Ring = RawRing<block_n, 4>;
using Share = Registers<team_threads / warpgroup_threads, 1>;
struct Shared {
    Ring ring;
    Passed passed[teams];
    Sum sums[teams][rows];
    Part blocks;  // of the sequence, that are the CTA's
};

FLASHLADDER_KERNEL(attention_mla, RowParams,
                   Launch{Share::num_threads, sizeof(Shared), rows, block_n}
                       .over("cdiv(num_heads * seqlen_q, block_m*num_heads_k)", "num_heads_k * num_parts", "1"));

// B operands of the warp's columns of Q, four neighbours a lane, as `WidenedA` has those of K. Of each row they are times a
// power of two, by which they are f16: what is less than a 2^29th of the largest one loses bits.
struct QColumns {
    uint32_t block[slice_steps][eights][2];

    // passed.unit receives the reciprocals, times the softmax's scale, from one of the warps that have the columns.
    template <class Tile>
    __device__ QColumns(const Tile &tile, const RowParams &params, int slice, Passed &passed, bool tells) {
#pragma unroll
        for (int n = 0; n < eights; ++n) {
            const int i = n * 8 + lane_index() / 4, four = lane_index() % 4;
            const dtype *row = tile.template element<dtype>(params.q, params.q_stride, i);
            uint32_t largest = 0;  // as bits of a float
#pragma unroll
            for (int step = 0; step < slice_steps; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool rotated = step == slice_steps - 1;
                    const int col = rotated ? head_dim_v + slice * 16 + four * 2 + half * 8
                                            : slice * 128 + step * 16 + four * 4 + half * 2;
                    const uint32_t two = tile.has(i) ? *reinterpret_cast<const uint32_t *>(row + col) : 0;
                    largest = max(largest, max(two << 16 & 0x7fffffff, two & 0x7fff0000));
                    block[step][n][half] = two;
                }
            largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 1));
            largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 2));
            // The largest one times the power is 2^14 to 2^15. With infinity or NaN, the power is 1.
            const uint32_t exponent = largest >> 23, of = exponent == 255 ? 141 : max(exponent, 15);
            const float power = __uint_as_float(268 - of << 23);
            if (tells && four == 0) passed.unit[i][slice] = __uint_as_float(of - 14 << 23) * params.softmax_scale * log2_e;
#pragma unroll
            for (int step = 0; step < slice_steps; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t &two = block[step][n][half];
                    const float low = __uint_as_float(two << 16) * power, high = __uint_as_float(two & 0xffff0000) * power;
                    two = step == slice_steps - 1 ? pack<dtype>(low, high) : pack<__half>(low, high);
                }
        }
    }
};

// A warp of a team.
struct TeamWarp {
    Ring &ring;
    Passed &passed;
    int team, warp, lane;
    float m[own_rows], l[own_rows];
    float o[own_cols / 16][eights][4];

    __device__ TeamWarp(Shared &shared, int warp_)
        : ring(shared.ring), passed(shared.passed[warp_ / team_warps]), team(warp_ / team_warps), warp(warp_ % team_warps),
          lane(lane_index()), o{} {
#pragma unroll
        for (int r = 0; r < own_rows; ++r) m[r] = -3.0e38f, l[r] = 0.0f;
    }

    __device__ int slice() const { return warp % col_slices; }       // of S's columns
    __device__ int first_row() const { return warp * own_rows; }  // of the softmax
    __device__ void wait_for_team(int barrier) const { named_barrier_sync(barrier + team, team_warps * 32); }

    // S^T of 32 keys, as far as the warp's columns go.
    __device__ void multiply_keys(int stage, const QColumns &q) {
        keep_in_place(lane);  // registers are few: what follows from it is worked out for each block
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const int first = warp / col_slices * 32 + tile * 16;
            const uint32_t row = shared_address(ring.block[stage]) + (first + lane % 16) * row_bytes + lane / 16 * 16;
            float s[eights][4] = {};
            auto multiply = [&](auto type, const uint32_t (&a)[4], int step) {
#pragma unroll
                for (int n = 0; n < eights; ++n)
                    mma_m16n8k16<decltype(type)>(s[n], a, q.block[step][n][0], q.block[step][n][1]);
            };
#pragma unroll
            for (int step = 0; step < slice_steps - 1; step += 2) {
                uint32_t found[4];
                ldmatrix_x4(found, row + slice() * 128 + step * 16);
                multiply(__half{}, WidenedA(found[0], found[1]).block, step);
                multiply(__half{}, WidenedA(found[2], found[3]).block, step + 1);
            }
            const int key = first + lane / 4;
            const float scale[2] = {ring.scale(stage, key, slice()), ring.scale(stage, key + 8, slice())};
#pragma unroll
            for (int n = 0; n < eights; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[n][i] *= scale[i / 2];
            uint32_t rotated[4];
            ldmatrix_x4(rotated, row + rotated_at + slice() * 32);
            multiply(dtype{}, rotated, slice_steps - 1);
#pragma unroll
            for (int n = 0; n < eights; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    passed.s[slice()][n * 8 + lane % 4 * 2 + i % 2][key + i / 2 * 8] = s[n][i];
        }
    }

    // P of the warp's rows, from the products of all columns, and by what O is yet to be multiplied. `left` keys of the part
    // are this block's or come after it. The largest P times a scale is 2^15, as an f16 may be: what is less than a 2^29th of
    // it loses bits.
    __device__ void exponentiate(int stage, int left) {
        keep_in_place(lane);
        const int key = lane * 2;  // and the next
        const float4 scales[2] = {four_scales(stage, key), four_scales(stage, key + 1)};
        const float of_scale[2] = {log2_of(scales[0]), log2_of(scales[1])};
        const unsigned there = sparse ? ring.rows_there(stage, key) : 0;
        float s[own_rows][2] = {};  // of all rows before any is passed on: what takes long goes on for all of them at once
#pragma unroll
        for (int r = 0; r < own_rows; ++r) {
            const float4 of_slice = *reinterpret_cast<const float4 *>(passed.unit[first_row() + r]);
            const float unit_of[col_slices] = {of_slice.x, of_slice.y, of_slice.z, of_slice.w};
#pragma unroll
            for (int slice = 0; slice < col_slices; ++slice) {
                const float2 two = *reinterpret_cast<const float2 *>(&passed.s[slice][first_row() + r][key]);
                s[r][0] += two.x * unit_of[slice], s[r][1] += two.y * unit_of[slice];
            }
        }
        float factor[own_rows];
#pragma unroll
        for (int r = 0; r < own_rows; ++r) {
            const int seen = causal ? left - passed.unseen[first_row() + r] : left;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (sparse ? !(there >> i & 1) : key + i >= seen) s[r][i] = -INFINITY;
            const float high = largest_of_warp(fmaxf(s[r][0] + of_scale[0], s[r][1] + of_scale[1])) - 15;
            const float highest = fmaxf(m[r], high);
            factor[r] = exp2_approx(m[r] - highest);
            m[r] = highest;
        }
#pragma unroll
        for (int r = 0; r < own_rows; ++r) {
            const int row = first_row() + r;
            const float p[2] = {exp2_approx(s[r][0] - m[r]), exp2_approx(s[r][1] - m[r])};
            l[r] = l[r] * factor[r] + (p[0] + p[1]);
            if (lane == 0) passed.factor[row] = factor[r];
            auto store = [&](int slice, float a, float b) {
                *reinterpret_cast<uint32_t *>(&passed.p[slice][row][key]) = pack<__half>(p[0] * a, p[1] * b);
            };
            store(0, scales[0].x, scales[1].x);
            store(1, scales[0].y, scales[1].y);
            store(2, scales[0].z, scales[1].z);
            store(3, scales[0].w, scales[1].w);
        }
    }

    // O^T = factor * O^T + V^T P^T.
    __device__ void multiply_values(int stage) {
        keep_in_place(lane);
        const int col = warp * own_cols;
#pragma unroll
        for (int n = 0; n < eights; ++n) {
            const float2 factor = *reinterpret_cast<const float2 *>(&passed.factor[n * 8 + lane % 4 * 2]);
#pragma unroll
            for (int c = 0; c < own_cols / 16; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[c][n][i] *= i % 2 ? factor.y : factor.x;
        }
        const uint32_t row = shared_address(ring.block[stage]) + lane * row_bytes + col;
#pragma unroll(rows == 16 ? 1 : 2)
        for (int half = 0; half < 2; ++half) {  // of the keys
            uint32_t p[eights][4];
#pragma unroll
            for (int n = 0; n < eights; ++n)
                ldmatrix_x4(p[n], shared_address(&passed.p[col / 128][n * 8 + lane % 8][half * 32 + lane / 8 * 8]));
#pragma unroll
            for (int c = 0; c < own_cols / 16; ++c) {
                uint32_t found[4];
                ldmatrix_x4_trans(found, row + half * 32 * row_bytes + c * 16);
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const TransposedA a(found[step * 2], found[step * 2 + 1]);
#pragma unroll
                    for (int n = 0; n < eights; ++n)
                        mma_m16n8k16<__half>(o[c][n], a.block, p[n][step * 2], p[n][step * 2 + 1]);
                }
            }
        }
    }

    // m and all of l.
    __device__ void tell_sums(Sum (&sums)[rows]) const {
#pragma unroll
        for (int r = 0; r < own_rows; ++r) {
            const float whole = warp_sum(l[r]);
            if (lane == 0) sums[first_row() + r] = {m[r], whole};
        }
    }

  private:
    __device__ float4 four_scales(int stage, int key) const {
        return reinterpret_cast<const float4 &>(ring.scale(stage, key, 0));
    }
    // In the order of floats, as integers; and back.
    __device__ static int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
    __device__ static float largest_of_warp(float x) {
        return __int_as_float(ordered(__reduce_max_sync(0xffffffff, ordered(__float_as_int(x)))));
    }
    // Of the largest scale. That of zeros only may be 0: no sum of P, 2^105 for a key then, must become infinite.
    __device__ static float log2_of(float4 scales) {
        const float largest = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
        return __log2f(fmaxf(largest, 0x1p-90f));
    }
};

// The sums of the teams' blocks as one: a team's O counts `weight` times, once it is divided by all of l.
struct AllSums {
    float lse, weight[teams];

    __device__ AllSums(const Shared &shared, int row) {
        float highest = -3.0e38f, l = 0.0f;
#pragma unroll
        for (int t = 0; t < teams; ++t) highest = fmaxf(highest, shared.sums[t][row].m);
#pragma unroll
        for (int t = 0; t < teams; ++t) {
            weight[t] = exp2_approx(shared.sums[t][row].m - highest);
            l += shared.sums[t][row].l * weight[t];
        }
#pragma unroll
        for (int t = 0; t < teams; ++t) weight[t] *= l > 0.0f ? 1.0f / l : 0.0f;
        lse = (highest + __log2f(l)) * ln_2;
    }
};

// Of the CTA, from what it has in shared memory: in loops registers are few.
__device__ inline LatentPart<rows, block_n, causal, RowParams> part_of(const RowParams &params, const Part &blocks) {
    const int number = cta_index().y / params.num_heads_k, head_k = cta_index().y - number * params.num_heads_k;
    return {params, blocks.sequence, head_k, number, blocks.first_block(0), blocks.first_block(1)};
}

// Multiplies with the team's blocks of the part.
__device__ inline void multiply_all(const RowParams &params, const Part &blocks, TeamWarp &warp) {
    const auto part = part_of(params, blocks);
    const QColumns q(part.tile, params, warp.slice(), warp.passed, warp.warp < col_slices);
    if (causal && warp.lane < own_rows) {
        const int row = warp.first_row() + warp.lane;
        warp.passed.unseen[row] = max(part.end - part.seen(row), 0);
    }
    Ring &ring = warp.ring;
    auto at = ring.consumer();
    auto skip = [&](int blocks) {
        for (int i = 0; i < blocks; ++i) at.advance();
    };
    skip(warp.team);
    for (int left = part.end - part.begin - warp.team * block_n; left > 0; left -= teams * block_n) {
        ring.full[at.stage].wait(at.parity);
        warp.multiply_keys(at.stage, q);
        warp.wait_for_team(has_scores);
        warp.exponentiate(at.stage, left);
        warp.wait_for_team(has_p);
        warp.multiply_values(at.stage);
        ring.release(at);
        skip(teams);
    }
}

// The warp's columns of O and of the other team's, in the order of `TeamWarp::o`.
using OtherO = float[team_warps][own_cols / 16][eights][4][32];

// Writes the warp's columns of O from the sums of all teams, and the log-sum-exp.
__device__ inline void store(const RowParams &params, const Partials &partials, const Shared &shared, const OtherO &other,
                             const TeamWarp &warp) {
    const auto part = part_of(params, shared.blocks);
    const auto &tile = part.tile;
    const bool is_whole = shared.blocks.count == 1;
    const int lane = lane_index(), col = warp.warp * own_cols + lane / 4 * 2;  // of the lane's pairs, 16 columns apart
#pragma unroll
    for (int n = 0; n < eights; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int i = n * 8 + lane % 4 * 2 + h;
            if (!tile.has(i)) continue;
            const AllSums all(shared, i);
            const long long at = params.row_index(part.number, tile.head(i), tile.row(i));
            dtype *whole = tile.template element<dtype>(params.o, params.o_stride, i) + col;
            float *of_part = partials.o + at * head_dim_v + col;
#pragma unroll
            for (int c = 0; c < own_cols / 16; ++c) {
                float two[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    two[k] = warp.o[c][n][h + 2 * k] * all.weight[0];
                    if (teams == 2) two[k] += other[warp.warp][c][n][h + 2 * k][lane] * all.weight[teams - 1];
                }
                if (is_whole)
                    *reinterpret_cast<uint32_t *>(whole + c * 16) = pack<dtype>(two[0], two[1]);
                else
                    *reinterpret_cast<float2 *>(of_part + c * 16) = make_float2(two[0], two[1]);
            }
            if (warp.warp != 0 || lane / 4 != 0) continue;
            if (!is_whole)
                partials.lse[at] = all.lse;
            else if (params.lse != nullptr)
                params.lse[params.row_index(tile.batch, tile.head(i), tile.row(i))] = or_of_no_key(all.lse, lse_of_no_key);
        }
}

extern "C" __global__ void __launch_bounds__(Share::num_threads, 1)
    attention_mla(const __grid_constant__ RowParams params, const __grid_constant__ Partials partials) {
    extern __shared__ __align__(128) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);

    const Part found = find_part<block_n, one_wave>(params, blockIdx.y / params.num_heads_k);
    if (found.sequence < 0) return;  // there are fewer parts
    launch_where_room(params, found);
    if (threadIdx.x == 0) {
        shared.blocks = found;
        shared.ring.init(team_warps);
        fence_mbarrier_init();
    }
    __syncthreads();  // the barriers are made
    const int copier = uniform_warp_index() - team_threads / 32;
    if (copier >= 0) {
        release_registers<Share::producer>();
        return shared.ring.fill(part_of(params, shared.blocks), copier);
    }
    take_registers<Share::consumer>();
    TeamWarp warp(shared, uniform_warp_index());
    multiply_all(params, shared.blocks, warp);
    warp.tell_sums(shared.sums[warp.team]);
    named_barrier_sync(all_done, team_threads);  // no block is read any more; the sums are there

    OtherO &other = *reinterpret_cast<OtherO *>(shared.ring.block);
    static_assert(sizeof(OtherO) <= sizeof(Ring::block), "a team's O has room where the blocks were");
    if (teams == 2) {
        if (warp.team == 1) {
#pragma unroll
            for (int i = 0; i < own_cols / 16 * eights * 4; ++i)
                other[warp.warp][i / 4 / eights][i / 4 % eights][i % 4][lane_index()] = warp.o[i / 4 / eights][i / 4 % eights][i % 4];
        }
        named_barrier_sync(all_done, team_threads);  // O of the other team is there
        if (warp.team == 1) return;
    }
    store(params, partials, shared, other, warp);
}

#include "sliced_combine.cuh"  // the second kernel
