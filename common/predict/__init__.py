"""What a kernel will cost, what keeps it from being faster, and how far the GPU agrees.

subcore, tile   the cost model: an SM's issue slots and pipes, cycle by cycle
limits/         what bounds a kernel, predicted or sampled
ncu             Nsight Compute's counters
profiling       a rung under ncu, logged
agreement       ncu's counters beside the emulator's and the machine code's
"""
