// DeepGEMM's bf16 GEMM for Hopper: tiles of 128 x 128 x 64, four stages; alone, and in clusters of two with multicast.
#include <deep_gemm/impls/sm90_bf16_gemm.cuh>

using namespace deep_gemm;

template <uint32_t cluster>
void *gemm() {
    constexpr auto k_major = cute::UMMA::Major::K;
    return reinterpret_cast<void *>(
        &sm90_bf16_gemm_impl<k_major, k_major, 0, 0, 0, 1, 128, 128, 64, 128, 128, 128, 4, 128, 256, cluster, (cluster > 1),
                             4, GemmType::Normal, false, cutlass::bfloat16_t>);
}
void *kernels[] = {gemm<1>(), gemm<2>()};
