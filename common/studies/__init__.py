"""What is asked of many runs: sweeps, ladders, errors over families of inputs, time stamps.

accuracy/      errors and times over families of inputs, against bars
experiments/   sweeps, and a whole ladder in one run
timeline/      who does what when in a kernel, by time stamps that it takes on the GPU
"""
