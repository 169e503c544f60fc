// Rung 19 for any attention: a causal mask, any lengths and strides, grouped heads. Blocks of keys that some row does not
// see whole come first, with masks and maxima; the loop over all others knows neither.
#include "18_anchored_softmax/anchored_softmax.cuh"
#include "23_general/assignment.cuh"
#include "23_general/panels.cuh"
#include "config.cuh"
#include "epilogue/store.cuh"
#include "softmax/mask.cuh"
#include "tile/gemm.cuh"

#include <type_traits>

using namespace config;

constexpr int num_threads = num_warps * 32;
constexpr int warp_rows = block_m / num_warps;
constexpr int buffers = double_buffer ? 2 : 1;

using QTile = SwizzledPanels<block_m, head_dim>;
using KVTile = SwizzledPanels<block_n, head_dim>;

constexpr int stage_size = 2 * KVTile::size;  // K and V
constexpr int stage_bytes = stage_size * sizeof(dtype);

constexpr int loss_at = QTile::size * sizeof(dtype) + 2 * stage_bytes;

FLASHLADDER_LAUNCH(num_threads, loss_at + sizeof(Loss), block_m, block_n);

extern "C" __global__ void __launch_bounds__(num_threads, ctas_per_sm)
    attention_forward(const __grid_constant__ AttentionParams params) {
    extern __shared__ __align__(128) char shared[];
    dtype *shared_q = reinterpret_cast<dtype *>(shared);
    dtype *shared_k = shared_q + QTile::size;
    dtype *shared_v = shared_k + KVTile::size;
    Loss &loss = *reinterpret_cast<Loss *>(shared + loss_at);
    loss.clear();

    const Assignment<dtype, block_m, head_dim, causal> work{params};
    const Mask<causal> mask{params};
    const int warp_row = warp_index() * warp_rows;
    const int first_row = work.first_row() + warp_row;  // of the warp

    const int blocks = mask.template blocks<block_n>(work.first_row() + work.rows());
    const int plain_blocks = mask.template plain_blocks<block_n>(work.first_row());

    PanelCopier<QTile, num_warps, dtype> q_copier;
    q_copier.start(shared_q, work.q(), params.q_stride.row);
    q_copier.copy_rows(0, work.rows());
    cp_async_commit();
    PanelCopier<KVTile, num_warps, dtype> k_copier, v_copier;
    k_copier.start(shared_k, work.k(), params.k_stride.row);
    v_copier.start(shared_v, work.v(), params.v_stride.row);
    cp_async_wait<0>();
    __syncthreads();  // Q is there for every warp

    QOperand<warp_rows, head_dim, q_fragments, HoistedReader<QTile, dtype>, buffers> q_operand;
    KOperand<block_n, head_dim, k_fragments, HoistedReader<KVTile, dtype, ByRow>, buffers> k_operand;
    VOperand<head_dim, block_n, v_fragments, HoistedReader<KVTile, dtype>, buffers> v_operand;
    q_operand.start(shared_q, warp_row);
    k_operand.reader.start(shared_k);
    v_operand.reader.start(shared_v);

    Accumulator<warp_rows, head_dim> o;
    AnchoredSoftmax<dtype, warp_rows> softmax{params.softmax_scale * log2_e};

    int to_other_stage = stage_bytes;

    // Block j; with its mask and maxima, or anchored to those before. True when the CTA is to stop.
    auto attend = [&](int j, auto is_anchored) {
        constexpr bool anchored = decltype(is_anchored)::value;
        cp_async_wait<0>();
        __syncthreads();  // K and V are there for every warp, and every warp has read the other stage
        bool stop = loss.known(j + 1);
        if (j > 0) {
            k_copier.copy(j - 1, to_other_stage);
            v_copier.copy(j - 1, to_other_stage);
            cp_async_commit();
        }

        if (anchored || j * block_n < mask.keys(first_row + warp_rows - 1)) {
            // S = Q K^T
            Accumulator<warp_rows, block_n> s;
            s.clear();
            gemm<dtype, head_dim, double_buffer, Serpentine>(s, q_operand, k_operand);

            // P = 2^(unit * S - m)
            if constexpr (anchored) {
                softmax.add(s);
            } else {
                mask.hide(s, first_row, j * block_n);
                softmax.update(s, o, j);
            }

            // O += P V
            auto p = round_to_operand<dtype>(s);
            gemm<dtype, block_n, double_buffer, Serpentine>(o, p, v_operand, [&](int step) { softmax.weigh(p, step); });
            if constexpr (anchored) stop = softmax.settle(o, j, stop, loss);
        }

        for (uint32_t *stage : {&k_copier.to, &v_copier.to, &k_operand.reader.base, &v_operand.reader.base})
            *stage += to_other_stage;
        to_other_stage = -to_other_stage;
        return stop;
    };
    // The blocks of a pass. Only the last one may be cut by the end of K and V.
    auto attend_all = [&](const Pass &pass) {
        if (pass.from >= 0) {
            k_copier.copy_rows(pass.from, params.seqlen_k - pass.from * block_n);
            v_copier.copy_rows(pass.from, params.seqlen_k - pass.from * block_n);
        }
        cp_async_commit();
        return attend_down<dtype>(pass, plain_blocks - 1, blocks - 1, softmax, loss, attend);
    };
    attend_passes(blocks - 1, softmax, o, attend_all);

    softmax.finish(o);
    if (params.lse != nullptr) softmax.store_lse(work.lse() + warp_row, work.rows() - warp_row);

    // A warp's rows of Q are read by that warp alone, so it may put its rows of O in their place.
    store_to_shared_hoisted<QTile>(shared_q, warp_row, o);
    __syncwarp();
    store_rows_before<QTile, warp_rows, StoreNoAllocate>(work.rows(), work.o(), params.o_stride.row, shared_q, warp_row);
}
