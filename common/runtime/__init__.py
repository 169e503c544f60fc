"""Artifact + problem -> output, on the GPU or the emulator.

target      where a kernel runs, and what it is built for    ready      what runs a kind of problem, kept
launch      what a kernel is launched with, and its grid     gpu        the CUDA driver
execute     one launch, in either place                      ahead      what is built into the package
calls       calls that come often, on the GPU                fast_path  the same in C++, by a plan
workspaces  memory that they are lent                        plan       what C++ is told of a rung
outputs     memory for what a call gives                     overlap    whether tensors share memory
"""
