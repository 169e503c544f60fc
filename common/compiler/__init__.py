"""Version + config + arch -> artifact, behind a cache that is addressed by content.

compile     kernels, many at once           artifact   what comes of one
sources     a kernel and its headers        cubin      the ELF file that ptxas makes
declaration what kernels tell of their launches
toolchain   finds nvcc and its companions   ninja      runs what is to be compiled
install     finished folders into the cache
library     C source -> shared library, for references on the CPU
prebuilt    kernels that came with the package
"""

from flashladder.common.compiler.artifact import Artifact, LaunchInfo, PtxModule
from flashladder.common.compiler.compile import BuildRequest, build, build_one, cached, translate, translated

__all__ = [
    "Artifact",
    "BuildRequest",
    "LaunchInfo",
    "PtxModule",
    "build",
    "build_one",
    "cached",
    "translate",
    "translated",
]
