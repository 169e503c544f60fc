"""The tuner: finds the best configuration of a rung for a GPU, and never loses a trial.

space       the configurations of a rung       candidates    kernels that may win: compiled, told apart by code, pruned
            that take the problems             model         how fast a kernel should be, from its machine code
job         a rung, a GPU, how to search       study_runner  the loop: claim, measure, record
strategy    which kernel is next               worker        a process that measures, and its watchdog
ledger      the study in its storage           finalists     who wins, and by what evidence
gpu_bench   what it does on a GPU              show          what a person sees of a search
trial_log   the study as CSV                   recorded      the search over a study in which every kernel was measured
campaign    rungs one after the other          outlook       what a run would take on a GPU that is not here
pair        two kernels beside each other

search is the script of the command of that name, in tools/commands/.
"""

AUTO = "auto"  # workers: one for each GPU that is visible
