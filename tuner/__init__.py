"""The tuner: finds the best configuration of a rung for a GPU, and never loses a trial.

search      the command line           space         the configurations of a rung that take the problems
job         a rung, a GPU, how to      candidates    kernels that may win: compiled, told apart by code, pruned
            search                     model         how fast a kernel should be, from its machine code
strategy    which kernel is next       study_runner  the loop: claim, measure, record
ledger      the study in its storage   worker        a process that measures, and its watchdog
gpu_bench   what it does on a GPU      finalists     who wins, and by what evidence
trial_log   the study as CSV           show          what a person sees of a search
plots       the study as pictures      replay        the search over a study in which every kernel was measured
"""
