// GEMMs of CUTLASS's collective builder for Hopper, bf16, in clusters of two with multicast: "cooperative", two warpgroups
// a tile, and "pingpong", a warpgroup a tile, which take turns. The program prints how the kernels are launched for M N K,
// the addresses of A, B and D, and a number of SMs: each tensor map that CUTLASS asks the driver for, then the kernel, its
// grid, threads, bytes of shared memory and parameters. In these a map is 128 bytes of MARK.
#include "cute/tensor.hpp"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler_params.h"
#include "cutlass/util/packed_stride.hpp"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace cute;
using cutlass::bfloat16_t;
using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;

constexpr unsigned char MARK = 0xA5;

template <class MainSchedule, class EpilogueSchedule, class Tile, class ClusterShape>
struct Gemm {
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, ClusterShape,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, 8, bfloat16_t, RowMajor, 8,
        EpilogueSchedule>::CollectiveOp;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, bfloat16_t, RowMajor, 8, bfloat16_t, ColumnMajor, 8, float, Tile,
        ClusterShape, cutlass::gemm::collective::StageCount<4>, MainSchedule>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;
};
using Pair = Shape<_2, _1, _1>;
using Cooperative = Gemm<cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                         cutlass::epilogue::TmaWarpSpecializedCooperative, Shape<_128, _128, _64>, Pair>::Kernel;
using Pingpong = Gemm<cutlass::gemm::KernelTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized,
                      Shape<_64, _128, _64>, Pair>::Kernel;
template __global__ void cutlass::device_kernel<Cooperative>(CUTLASS_GRID_CONSTANT Cooperative::Params const);
template __global__ void cutlass::device_kernel<Pingpong>(CUTLASS_GRID_CONSTANT Pingpong::Params const);

template <class Kernel>
void print(const char *name, int m, int n, int k, uint64_t a, uint64_t b, uint64_t d, int sms) {
    using cutlass::make_cute_packed_stride;
    typename Kernel::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {reinterpret_cast<bfloat16_t *>(a), make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1}),
         reinterpret_cast<bfloat16_t *>(b), make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1})},
        {{1.f, 0.f},
         nullptr,
         {},
         reinterpret_cast<bfloat16_t *>(d),
         make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1})},
        {0, sms, sms}};
    const auto params = Kernel::to_underlying_arguments(arguments, nullptr);
    const dim3 grid = Kernel::get_grid_shape(params), block = Kernel::get_block_shape();
    printf("%s %u %u %u %u %d ", name, grid.x, grid.y, grid.z, block.x, int(Kernel::SharedStorageSize));
    for (size_t i = 0; i < sizeof(params); ++i) printf("%02x", reinterpret_cast<const unsigned char *>(&params)[i]);
    printf("\n");
}

// In the driver's place: address, swizzle, then of each dimension its elements, the box's, and the stride in bytes.
extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *address,
                                           const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    memset(map, MARK, sizeof *map);
    printf("map %p %d", address, int(swizzle));
    for (unsigned i = 0; i < rank; ++i)
        printf(" %llu %u %llu", (unsigned long long)dims[i], box[i], i > 0 ? (unsigned long long)strides[i - 1] : 0ull);
    printf("\n");
    return CUDA_SUCCESS;
}
extern "C" CUresult cuTensorMapEncodeIm2col(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                            const cuuint64_t *, const int *, const int *, cuuint32_t, cuuint32_t,
                                            const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    abort();
}

int main(int, char **arguments) {
    auto at = [&](int i) { return strtoull(arguments[i], nullptr, 0); };
    print<Cooperative>("Cooperative", at(1), at(2), at(3), at(4), at(5), at(6), at(7));
    print<Pingpong>("Pingpong", at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}
