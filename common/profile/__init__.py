"""Nsight Compute's counters, and whether the emulator and the machine code agree with them.

profiling   a kernel under ncu, logged          ncu   its pages, read          agreement   two counts side by side
"""
