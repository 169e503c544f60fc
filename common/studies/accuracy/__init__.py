"""How exact a kernel's output is over families of inputs, beside other people's kernels; and how fast it is on each.

families (beside problem) say what the inputs are; deviation measures an output against the exact one and holds it
against bars; yardstick is a plain algorithm for where no official kernel runs; study runs everything, timing times it,
logged logs both; view and page show what came of it.
"""
