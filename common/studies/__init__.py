"""What is asked of a run, or of many: sweeps, ladders, errors over families of inputs, time stamps.

single         one kernel on one problem: run, checked, measured or counted
accuracy/      errors and times over families of inputs, against bars
experiments/   sweeps, and a whole ladder in one run
models/        a model of transformers, and one in training, with this attention and with another
ring_trial     ring attention over GPUs of one host
host_costs     what a call takes of the host, ours and others'
timeline/      who does what when in a kernel, by time stamps that it takes on the GPU
"""
