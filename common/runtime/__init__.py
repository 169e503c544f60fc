"""Artifact + problem -> output, on the GPU or the emulator.

target      where a kernel runs, and what it is built for    tuned      the tuner's winners, as a default
launch      what a kernel is launched with, and its grid     gpu        the CUDA driver
execute     one launch, in either place                      ahead      what is built into the package
calls       calls that come often, on the GPU                fast_path  the same in C++, by a plan
workspaces  memory that they are lent                        plan       what C++ is told of a rung
"""
