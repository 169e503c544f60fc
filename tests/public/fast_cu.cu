// Kernels of pranjalssh/fast.cu, with the tiles of their authors; the persistent ones for 64 SMs.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cuda/barrier>

#include <cassert>
#include <cstring>
#include <string>
#include <vector>

// What their main program declares before it includes them.
using bf16 = __nv_bfloat16;
#define CEIL_DIV(M, N) (((M) + (N) - 1) / (N))
#define cudaCheck(call) (call)

#include "examples/matmul/matmul_2.cuh"
#include "examples/matmul/matmul_3.cuh"
#include "examples/matmul/matmul_4.cuh"
#include "examples/matmul/matmul_5.cuh"
#include "examples/matmul/matmul_6.cuh"
#include "examples/matmul/matmul_7.cuh"
#include "examples/matmul/matmul_8.cuh"
#include "examples/matmul/matmul_9.cuh"
#include "examples/matmul/matmul_10.cuh"
#include "examples/matmul/matmul_11.cuh"
#include "examples/matmul/matmul_12.cuh"

#define MAP const __grid_constant__ CUtensorMap
template __global__ void M6::matmulKernel6<128, 256, 64, 384, 3, 64>(int, int, int, bf16 *, MAP, MAP);
template __global__ void M7::matmulKernel7<128, 256, 64, 384, 3, 64>(int, int, int, bf16 *, MAP, MAP);
template __global__ void M8::matmulKernel8<128, 256, 64, 384, 3, 64, 2, 1>(int, int, int, bf16 *, MAP, MAP);
template __global__ void M9::matmulKernel9<128, 256, 64, 384, 3, 64, 2, 1>(int, int, int, bf16 *, MAP, MAP);
template __global__ void M10::matmulKernel10<128, 256, 64, 384, 3, 64, 2, 1>(int, int, int, MAP, MAP, MAP);
