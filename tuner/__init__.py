"""The tuner: finds the best configuration of a rung for a GPU, and never loses a trial.

search     the command line            space      the configurations of a rung that take the problems
kernels    compiled, told apart by     model      how fast a kernel should be, from its machine code
           code, pruned                searcher   which kernel to measure next
ledger     the study in its storage    tuning     the loop: claim, measure, record
worker     a process that measures,    gpu_bench  what it does on a GPU
           and its watchdog            finalists  who wins, and by what evidence
trial_log  the study as CSV            plots      the study as pictures       replay   the search over a recorded sweep
"""
