"""Times kernels side by side, in the same rounds, and beside other people's.

entrants     who takes part, compiled             contest      checks and measures them on one problem
timing       rounds on the GPU                    cpu_timer    the timer for what runs on the CPU
graphs       launches in a CUDA graph             l2           nothing stays in it by privilege
spot         unannounced checks of timed calls
nvml         clocks, power, temperature           statistics   estimates and intervals
baselines    other people's attention kernels     packing      packed sequences beside padded ones
"""
