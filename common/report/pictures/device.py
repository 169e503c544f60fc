"""Runs the device headers on the host: their own functions say where elements lie and which thread copies what.

The layouts, copiers and readers and the kernel.cu of the first rung are compiled by the C++ compiler as they are; only
ptx/sm80.cuh, the instructions, is replaced, by functions that note what would have been done.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flashladder.common import catalog
from flashladder.common.compiler.toolchain import find_host_compiler
from flashladder.common.errors import BuildError
from flashladder.common.paths import CUDA_HEADERS

HEADERS = ("launch.cuh", "params.cuh", "tile/layout.cuh", "tile/reader.cuh", "pipeline/copy.cuh")
ROWS, COLS, WARPS = 64, 128, 4  # of the tile that is shown, and of the CTA

_HOST = """
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <algorithm>
using std::min;
#define __device__
#define __global__
#define __constant__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(threads)
#define __grid_constant__
struct Index { int x, y, z; };
struct uint4 { uint32_t x, y, z, w; };
inline Index threadIdx, blockIdx;
inline void __syncthreads() {}
inline float __shfl_xor_sync(unsigned, float value, int) { return value; }
inline int __shfl_sync(unsigned, int value, int) { return value; }
"""

_PTX = """
#pragma once
#include "host.h"
inline uint16_t shared_memory[ROWS * COLS], global_memory[ROWS * COLS];
inline uint32_t shared_address(const void *p) { return static_cast<const char *>(p) - (char *)shared_memory; }
inline bool first = true;
inline void cp_async_16(uint32_t shared, const void *global) {
    const long element = static_cast<const uint16_t *>(global) - global_memory;
    printf("%s[%d, %ld, %ld, %d]", first ? "" : ", ", threadIdx.x, element / COLS, element % COLS, shared / 2);
    first = false;
}
"""

_CONFIG = "namespace config { using dtype = uint16_t; constexpr int head_dim = COLS, block_m = 32, block_n = 32; }\n"

_PROGRAM = """
#include "host.h"
#include "config.cuh"
#include "params.cuh"
#include "pipeline/copy.cuh"
#include "tile/reader.cuh"
namespace minimal {
#undef FLASHLADDER_KERNEL  // what a kernel tells of its launch is for CUDA alone
#define FLASHLADDER_KERNEL(...) static_assert(true)
#include "kernel.cu"
}
char minimal::shared[1];

template <class Function>
void list(const char *name, int count, Function value, bool last = false) {
    printf("\\"%s\\": [", name);
    for (int i = 0; i < count; ++i) printf("%s%d", i ? ", " : "", value(i));
    printf("]%s\\n", last ? "" : ",");
}
template <class Function>
void lanes(const char *name, Function value) {
    list(name, 32, [&](int lane) { threadIdx.x = lane; return value(); });
}
template <class Tile>
void tile(const char *name) {
    list(name, ROWS * COLS, [](int i) { return Tile::offset(i / COLS, i % COLS); });
}
template <class Copy>
void copies(const char *name, Copy copy) {
    printf("\\"%s\\": [", name);
    first = true;
    for (threadIdx.x = 0; threadIdx.x < 32 * WARPS; ++threadIdx.x) copy();
    printf("],\\n");
}
int main() {
    using S = Swizzled<ROWS, COLS>;
    printf("{");
    tile<RowMajor<ROWS, COLS>>("RowMajor");
    tile<S>("Swizzled");
    tile<SwizzledPanels<ROWS, COLS>>("SwizzledPanels");
    lanes("ByColumn.row", ByColumn::row);
    lanes("ByColumn.col", ByColumn::col);
    lanes("ByRow.row", ByRow::row);
    lanes("ByRow.col", ByRow::col);
    list("ByColumn.block", 4, [](int i) { return ByColumn::block(i / 2, i % 2); });
    list("ByRow.block", 4, [](int i) { return ByRow::block(i / 2, i % 2); });
    lanes("accumulator_row", accumulator_row);
    lanes("accumulator_col", accumulator_col);
    copies("by_warps", [] { copy_tile_by_warps<S, WARPS>(shared_memory, global_memory, COLS); });
    copies("by_cta", [] { copy_tile<S, WARPS>(shared_memory, global_memory, COLS); });
    list("minimal.column", COLS, [](int i) {
        return minimal::column(i % minimal::lane_cols, i / minimal::lane_cols);
    }, true);
    printf("}");
}
"""


@dataclass(frozen=True)
class DeviceHeaders:
    """What the headers say of a tile of ROWS x COLS 16-bit elements and a CTA of WARPS warps."""

    lists: dict[str, Any]

    def offset(self, layout: str, row: int, col: int) -> int:
        """Where an element lies in shared memory, in elements, under RowMajor, Swizzled or SwizzledPanels."""
        return int(self.lists[layout][row * COLS + col])

    def lane(self, name: str, lane: int) -> int:
        """A lane's value of ByColumn.row, ByRow.col, accumulator_row, ..."""
        return int(self.lists[name][lane])

    def copies(self, name: str) -> list[tuple[int, int, int, int]]:
        """Thread, row, column and place in shared memory of each 16-byte copy, by_warps or by_cta."""
        return [tuple(copy) for copy in self.lists[name]]


@cache
def device_headers() -> DeviceHeaders:
    """Compiles and runs the headers as they are now. Raises BuildError, ToolchainError."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copy(catalog.versions()[0].kernel, folder / "kernel.cu")
        replaced = {
            "host.h": _HOST,
            "ptx/sm80.cuh": _PTX,
            "config.cuh": _CONFIG,
            "program.cpp": _PROGRAM,
        }
        for name, text in {**{name: (CUDA_HEADERS / name).read_text() for name in HEADERS}, **replaced}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        sizes = [f"-D{name}={value}" for name, value in (("ROWS", ROWS), ("COLS", COLS), ("WARPS", WARPS))]
        options = ["-std=c++17", "-w", "-I.", *sizes, "-include", "host.h", "-o", "program"]
        command = [str(find_host_compiler()), *options, "program.cpp"]
        compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if compiled.returncode:
            raise BuildError(f"the device headers do not compile for the host:\n{compiled.stderr}")
        run = subprocess.run([folder / "program"], capture_output=True, text=True, check=True)
    return DeviceHeaders(json.loads(run.stdout))
