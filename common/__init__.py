"""What every rung and tool shares: one way from a version and a config to a verified, measured result.

The rooms, in the order of their imports: each knows only those above it. What every room uses lies beside them: paths,
errors, YAML files, the console, the host, and ladders of one's own.

expression  masks and scores as text: a typed tree, what the compiler reads of it, and what it comes to
problem     operations, problems and their inputs, configurations and the rules for them
catalog     the ladders, rungs and references in versions/, and what each declares
emulator    runs PTX on the CPU: parse, execute, races
compiler    version + config + arch -> artifact; reading its machine code
runtime     artifact + problem -> output, on the GPU or the emulator
api         attention under the names that models call
measure     times kernels side by side, and beside other people's
records     the CSV logs, and what they come to
predict     what a kernel will cost, and what bounds it; how far the GPU agrees
studies     runs, and many for one question: sweeps, ladders, accuracy, timelines
report      every table, section, picture and page
workshop    new rungs, trials of ideas, exercises
book        a site of all pages, and of the rungs' code

cuda        the device headers that the rungs share
"""
