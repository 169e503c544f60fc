"""Artifact + problem -> output, on the GPU or the emulator.

target    where a kernel runs, and what it is built for   tuned    the tuner's winners, as a default
launch    the kernel's argument and its grid              gpu      the CUDA driver
execute   one launch, in either place                 calls     calls that come often, on the GPU
ahead     what is built into the package               quick     the same calls in C++
"""
