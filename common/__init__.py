"""What every rung and tool shares: one way from a version and a config to a verified, measured result.

The rooms, in the order of their imports: each knows only those above it. What every room uses lies beside them.

families      inputs that are hard on an attention kernel, by design
operations    what a problem asks for: its tensors, exact answer and tolerance
catalog       the rungs and references in versions/, and what each declares
emulator      runs PTX on the CPU
build         version + config + arch -> artifact
sass          what the machine code of an artifact says
run           artifact + problem -> output, on the GPU or the emulator
references    implementations beside the ladder, which compile themselves
measure       times kernels side by side, and beside other people's
results       the CSV logs, and what they come to
profile       Nsight Compute's counters beside the emulator's and the machine code's
timeline      who does what when in a kernel, by time stamps that it takes on the GPU
limits        what keeps a kernel from being faster: predicted, or sampled on a GPU
report        tables for the terminal and for READMEs, and the colours of all figures
ideas         a new rung, what a trial of it gives, and the log of what was tried
experiments   the sweeps
accuracy      errors and times over families of inputs, against bars
pictures      drawings of what the code does
dashboard     pages and charts of what was measured
exercises     a rung with its idea taken out, a task, and a grade for what is put in
attention     attention as a function of torch tensors, and under the names that models call
adoption      what a program asks of attention, what tuning for it gains, and the folder of its winners

cuda          the device headers that the rungs share
"""
