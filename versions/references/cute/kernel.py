"""FlashAttention-2's forward pass in CuTe DSL: layouts, tiles and atoms as values, the instructions of rungs 01 to 17.

Copies are cp.async, fragments come by ldmatrix, products are mma.sync. The copy of V(j) runs behind Q K^T, that of
K(j + 1) behind the softmax and P V. Written against nvidia-cutlass-dsl 4.8.
"""

# No `from __future__ import annotations`: the compiler reads the annotations of its functions.
from functools import cache
from importlib import metadata

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_stream, make_ptr

from flashladder.common.measure.references import Prepared, room_for_lse
from flashladder.common.problem.config import KernelConfig
from flashladder.common.problem.inputs import Tensors
from flashladder.common.problem.problem import Problem

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
COPY = 8  # 16-bit elements of a 16-byte copy
PANEL = 64  # columns of a swizzled panel in shared memory
LOG2_E = 1.4426950408889634
TOLERANCE = 8.0  # log2
LOWEST = -3.0e38  # finite, so that it can be subtracted from itself


class Attention:
    """The kernel in one configuration. Whole tiles of Q and K; causal masks need block_m % block_n == 0."""

    def __init__(self, config: KernelConfig):
        self.dtype = TYPES[config.dtype]
        self.head_dim, self.causal = config.head_dim, config.causal
        self.block_m, self.block_n, self.num_warps = config.block_m, config.block_n, config.num_warps
        self.num_threads = 32 * config.num_warps

    @cute.jit
    def __call__(
        self, q: cute.Pointer, k: cute.Pointer, v: cute.Pointer, o: cute.Pointer, lse: cute.Pointer,
        shape: tuple, strides: tuple, scale_log2: cutlass.Float32, stream,
    ):  # fmt: skip
        """shape: batch, num_heads, num_heads_k, seqlen_q, seqlen_k; strides: (batch, row, head) of q, k, v and o."""
        batch, num_heads, num_heads_k, seqlen_q, seqlen_k = shape
        swizzled = cute.make_composed_layout(
            cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, PANEL), stride=(PANEL, 1))
        )
        q_layout = cute.tile_to_shape(swizzled, (self.block_m, self.head_dim), (0, 1))
        kv_layout = cute.tile_to_shape(swizzled, (self.block_n, self.head_dim), (0, 1))

        copy_atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
        )
        store_atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        lanes = cute.make_layout((self.num_threads // (PANEL // COPY), PANEL // COPY), stride=(PANEL // COPY, 1))
        values = cute.make_layout((1, COPY))
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.dtype, cutlass.Float32, (16, 8, 16)),
            (self.num_warps, 1, 1),
            permutation_mnk=(16 * self.num_warps, 16, 16),
        )
        shared_bytes = (self.block_m + 2 * self.block_n) * self.head_dim * 2
        self.kernel(
            q, k, v, o, lse, num_heads, num_heads // num_heads_k, seqlen_q, seqlen_k, strides, scale_log2,
            q_layout, kv_layout, cute.make_tiled_copy_tv(copy_atom, lanes, values),
            cute.make_tiled_copy_tv(store_atom, lanes, values), mma,
        ).launch(
            grid=(seqlen_q // self.block_m, num_heads, batch),
            block=(self.num_threads, 1, 1),
            smem=shared_bytes,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: cute.Pointer, k: cute.Pointer, v: cute.Pointer, o: cute.Pointer, lse: cute.Pointer,
        num_heads: cutlass.Int32, heads_per_k: cutlass.Int32, seqlen_q: cutlass.Int32, seqlen_k: cutlass.Int32,
        strides: tuple, scale_log2: cutlass.Float32, q_layout: cute.ComposedLayout, kv_layout: cute.ComposedLayout,
        copy: cute.TiledCopy, store: cute.TiledCopy, mma: cute.TiledMma,
    ):  # fmt: skip
        """One CTA computes block_m rows of one head."""
        thread, _, _ = cute.arch.thread_idx()
        number, head, batch = cute.arch.block_idx()
        if cutlass.const_expr(self.causal):
            number = seqlen_q // self.block_m - 1 - number  # the long rows first
        q_stride, k_stride, v_stride, o_stride = strides
        d, block_m, block_n = self.head_dim, self.block_m, self.block_n
        gQ = self.rows_of(q, q_stride, batch, head, seqlen_q, block_m, number)
        gO = self.rows_of(o, o_stride, batch, head, seqlen_q, block_m, number)
        gK = self.rows_of(k, k_stride, batch, head // heads_per_k, seqlen_k, block_n, None)
        gV = self.rows_of(v, v_stride, batch, head // heads_per_k, seqlen_k, block_n, None)

        memory = cutlass.utils.SmemAllocator()
        sQ = memory.allocate_tensor(self.dtype, q_layout, 128)
        sK = memory.allocate_tensor(self.dtype, kv_layout, 128)
        sV = memory.allocate_tensor(self.dtype, kv_layout, 128)
        sVt = cute.composition(sV, cute.make_layout((d, block_n), stride=(block_n, 1)))

        # Global to shared, a thread's share.
        thr_copy = copy.get_slice(thread)
        tQgQ, tQsQ = thr_copy.partition_S(gQ), thr_copy.partition_D(sQ)
        tKgK, tKsK = thr_copy.partition_S(gK), thr_copy.partition_D(sK)
        tVgV, tVsV = thr_copy.partition_S(gV), thr_copy.partition_D(sV)

        # Shared to registers, in the fragments that mma takes.
        thr_mma = mma.get_slice(thread)
        rQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ))
        rK = thr_mma.make_fragment_B(thr_mma.partition_B(sK))
        rVt = thr_mma.make_fragment_B(thr_mma.partition_B(sVt))
        rO = cute.make_rmem_tensor(thr_mma.partition_shape_C((block_m, d)), cutlass.Float32)
        rO.fill(0.0)
        plain = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        transposed = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype)
        load_q = cute.make_tiled_copy_A(plain, mma)
        load_k = cute.make_tiled_copy_B(plain, mma)
        load_v = cute.make_tiled_copy_B(transposed, mma)
        from_q, to_q = load_q.get_slice(thread).partition_S(sQ), load_q.get_slice(thread).retile(rQ)
        from_k, to_k = load_k.get_slice(thread).partition_S(sK), load_k.get_slice(thread).retile(rK)
        from_v, to_v = load_v.get_slice(thread).partition_S(sVt), load_v.get_slice(thread).retile(rVt)

        # Two rows of each 16 x 8 block of S and O are a lane's.
        num_rows = 2 * block_m // (16 * self.num_warps)
        row_max = cute.make_rmem_tensor(cute.make_layout(num_rows), cutlass.Float32)
        row_sum = cute.make_rmem_tensor(cute.make_layout(num_rows), cutlass.Float32)
        row_max.fill(LOWEST)
        row_sum.fill(0.0)
        places = thr_mma.partition_C(cute.make_identity_tensor((block_m, block_n)))
        rows_cols = self.by_rows(places)

        blocks = seqlen_k // block_n
        shift = seqlen_k - seqlen_q
        if cutlass.const_expr(self.causal):
            blocks = cutlass.min(blocks, (number * block_m + block_m + shift + block_n - 1) // block_n)

        cute.copy(copy, tQgQ, tQsQ)
        if blocks > 0:
            cute.copy(copy, tKgK[None, None, None, 0], tKsK)
        cute.arch.cp_async_commit_group()
        for j in cutlass.range(blocks):
            # K(j) is there; every warp has read V(j - 1), whose place V(j) takes.
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            cute.copy(copy, tVgV[None, None, None, j], tVsV)
            cute.arch.cp_async_commit_group()

            # S = Q K^T
            rS = cute.make_rmem_tensor(thr_mma.partition_shape_C((block_m, block_n)), cutlass.Float32)
            rS.fill(0.0)
            for step in cutlass.range_constexpr(d // 16):
                cute.copy(load_q, from_q[None, None, step], to_q[None, None, step])
                cute.copy(load_k, from_k[None, None, step], to_k[None, None, step])
                cute.gemm(mma, rS, rQ[None, None, step], rK[None, None, step], rS)

            # V(j) is there; every warp has read K(j), whose place K(j + 1) takes.
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if j + 1 < blocks:
                cute.copy(copy, tKgK[None, None, None, j + 1], tKsK)
            cute.arch.cp_async_commit_group()

            if cutlass.const_expr(self.causal):  # noqa: SIM102 - one is for the compiler, one for the GPU
                if (j + 1) * block_n > number * block_m + shift + 1:
                    self.mask(rS, rows_cols, number * block_m + shift, j * block_n)
            self.softmax(rS, rO, row_max, row_sum, scale_log2)

            # O += P V: S as mma left it, rounded, is the A operand.
            rP = cute.make_rmem_tensor_like(rS, self.dtype)
            rP.store(rS.load().to(self.dtype))
            operand = self.as_operand(rP)
            for step in cutlass.range_constexpr(block_n // 16):
                cute.copy(load_v, from_v[None, None, step], to_v[None, None, step])
                cute.gemm(mma, rO, operand[None, None, step], rVt[None, None, step], rO)

        first = (batch * num_heads + head) * seqlen_q + number * block_m
        self.finish(rO, row_max, row_sum, rows_cols, lse, first, scale_log2)

        # O goes out through Q's shared memory, 16 bytes a lane.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        rounded = cute.make_rmem_tensor_like(rO, self.dtype)
        rounded.store(rO.load().to(self.dtype))
        out = cute.make_tiled_copy_C(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype), mma).get_slice(
            thread
        )
        cute.copy(out, out.retile(rounded), out.partition_D(sQ))
        cute.arch.sync_threads()
        thr_store = store.get_slice(thread)
        tOsO, tOgO = thr_store.partition_S(sQ), thr_store.partition_D(gO)
        staged = cute.make_rmem_tensor_like(tOsO, self.dtype)
        cute.autovec_copy(tOsO, staged)
        cute.copy(store, staged, tOgO)

    @cute.jit
    def rows_of(self, base, stride, batch, head, rows, tile_rows, number):
        """Tiles of one head's rows: (tile_rows, head_dim), with number=None (..., tiles)."""
        start = batch * stride[0] + head * stride[2]
        layout = cute.make_layout((rows, self.head_dim), stride=(cute.assume(stride[1], divby=COPY), 1))
        aligned = (base + cute.assume(start, divby=COPY)).align(16)
        return cute.local_tile(cute.make_tensor(aligned, layout), (tile_rows, self.head_dim), (number, 0))

    def by_rows(self, accumulator):
        """An accumulator ((2, 2), m, n) as (rows, columns) of a lane."""
        (col, row), m, n = accumulator.layout.shape
        (col_by, row_by), m_by, n_by = accumulator.layout.stride
        layout = cute.make_layout(((row, m), (col, n)), stride=((row_by, m_by), (col_by, n_by)))
        return cute.make_tensor(accumulator.iterator, layout)

    def as_operand(self, p):
        """P as mma's C, ((2, 2), m, n), as its A: ((2, 2, 2), m, n / 2), two blocks of 8 columns to a step of 16."""
        halves = cute.logical_divide(p.layout, (None, None, 2))
        shape, stride = halves.shape, halves.stride
        layout = cute.make_layout(
            ((*shape[0], shape[2][0]), shape[1], shape[2][1]),
            stride=((*stride[0], stride[2][0]), stride[1], stride[2][1]),
        )
        return cute.make_tensor(p.iterator, layout)

    @cute.jit
    def mask(self, rS, rows_cols, first_row, first_key):
        """Minus infinity where a row does not see a key."""
        scores = self.by_rows(rS)
        for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
            for c in cutlass.range_constexpr(cute.size(scores.shape[1])):
                if first_key + rows_cols[r, c][1] > first_row + rows_cols[r, c][0]:
                    scores[r, c] = -cutlass.Float32.inf

    @cute.jit
    def softmax(self, rS, rO, row_max, row_sum, scale_log2):
        """S becomes P = 2^(scale S - m). A lane sums its own columns.

        m rises, and O and the sums follow, only where a score has passed it by TOLERANCE: until then P is larger than
        1, which floating point does not mind.
        """
        scores, output = self.by_rows(rS), self.by_rows(rO)
        highest = cute.make_rmem_tensor_like(row_max)
        passed = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            highest[r] = scores[r, None].load().reduce(cute.ReductionOp.MAX, -cutlass.Float32.inf, 0) * scale_log2
            passed = passed | (highest[r] > row_max[r] + TOLERANCE)
        if cute.arch.vote_any_sync(passed):
            for r in cutlass.range_constexpr(cute.size(row_max)):
                risen = cute.arch.fmax(row_max[r], highest[r])
                risen = cute.arch.fmax(risen, cute.arch.shuffle_sync_bfly(risen, offset=2))
                risen = cute.arch.fmax(risen, cute.arch.shuffle_sync_bfly(risen, offset=1))
                rescale = cute.math.exp2(row_max[r] - risen, fastmath=True)
                row_max[r] = risen
                row_sum[r] = row_sum[r] * rescale
                output[r, None].store(output[r, None].load() * rescale)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            p = cute.math.exp2(scores[r, None].load() * scale_log2 - row_max[r], fastmath=True)
            row_sum[r] = p.reduce(cute.ReductionOp.ADD, row_sum[r], 0)
            scores[r, None].store(p)

    @cute.jit
    def finish(self, rO, row_max, row_sum, rows_cols, lse, first, scale_log2):
        """O / l, and the logarithm of each row's sum. A row that saw no key is 0 and minus infinity."""
        output = self.by_rows(rO)
        out = cute.make_tensor(lse + first, cute.make_layout(self.block_m))
        for r in cutlass.range_constexpr(cute.size(row_max)):
            total = row_sum[r]
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            total += cute.arch.shuffle_sync_bfly(total, offset=1)
            seen = total > 0.0
            inverse = 1.0 / total if seen else cutlass.Float32(0.0)
            output[r, None].store(output[r, None].load() * inverse)
            if rows_cols[r, 0][1] == 0:
                logarithm = row_max[r] / LOG2_E + cute.math.log(total)
                out[rows_cols[r, 0][0]] = logarithm if seen else -cutlass.Float32.inf


@cache
def compiled(config: KernelConfig):
    """The kernel, compiled for the GPU of this machine or that of $CUTE_DSL_ARCH."""
    return cute.compile(
        Attention(config), *_arguments(config, [0] * 5, [1] * 5, [[COPY] * 3] * 4, 1.0), make_fake_stream()
    )


def _arguments(config: KernelConfig, addresses, shape, strides, scale_log2):
    types = [TYPES[config.dtype]] * 4 + [cutlass.Float32]
    pointers = [
        make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16 if kind is not cutlass.Float32 else 4)
        for kind, address in zip(types, addresses, strict=True)
    ]
    shape = tuple(cutlass.Int32(size) for size in shape)
    strides = tuple(tuple(cutlass.Int64(step) for step in tensor) for tensor in strides)
    return *pointers, shape, strides, cutlass.Float32(scale_log2)


def prepare(problem: Problem, config: KernelConfig, tensors: Tensors) -> Prepared:
    """Compiles, and binds to the tensors, on torch's current stream."""
    kernel = compiled(config)
    four = tensors.q, tensors.k, tensors.v, tensors.o
    lse = room_for_lse(problem, tensors)
    arguments = _arguments(
        config,
        [tensor.data_ptr() for tensor in (*four, lse)],
        [problem.batch, problem.num_heads, problem.num_heads_k, problem.seqlen_q, problem.seqlen_k],
        [tensor.stride()[:3] for tensor in four],
        problem.softmax_scale * LOG2_E,
    )

    def launch(_keep_alive: object = lse) -> None:
        kernel(*arguments, cuda.CUstream(torch.cuda.current_stream().cuda_stream))

    return Prepared(launch)


def toolkit() -> str:
    """The package."""
    return f"nvidia-cutlass-dsl {metadata.version('nvidia-cutlass-dsl')}"
