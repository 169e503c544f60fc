"""The logs: CSV files that survive damage, what their rows hold, and what they come to.

log          a CSV file with a schema              schemas   the columns of each log
run_files    logs of a compressed file a run       cells     what a cell may hold
slowdowns    what slowed the GPU meanwhile         records   the logs, and their rows
ladder_runs  which of the ladder's runs is shown   ladders   the ladder's, summarised
factors      how much longer an option takes        benches   what bench timed of each ladder
"""
