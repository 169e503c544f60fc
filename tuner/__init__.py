"""The tuner: finds the best configuration of a rung for a GPU, and never loses a trial.

Read in this order; each knows only those above it.

space         what is searched: the configurations of a rung that take the problems
candidates    their kernels that may win: compiled, told apart by machine code, pruned, priced (common/predict/cost)
storage       Optuna's storages by URL
strategies    which kernel is measured next: a file each
worker        a process that measures, and its watchdog
gpu_bench     what it does on a GPU
forecast      a search without a GPU: configurations priced, as many as there is time for
ledger        a study in its storage: claims and outcomes, and whether who claimed still lives
trial_log     the study as CSV
finalists     who wins, and by what evidence
study_runner  the loop: claim, measure, record
job           all of it for one rung and one GPU: Job.tune(ranking, workers, ledger)
show          what a person sees of a search
campaign      all of it in one call, spaces one after the other: tune(spaces, gpu, workers, options)
adopt         what one program asks for, tuned, and the winners kept for it
recorded      the search replayed over a study in which every kernel was measured
pair          a rung timed beside its parent in a worker's process, for common/workshop

search is the script of the command of that name, in tools/commands/.
"""

AUTO = "auto"  # workers: one for each GPU that is visible
