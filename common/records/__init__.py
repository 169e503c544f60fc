"""The logs: append-only CSV files that survive damage, what their rows hold, and what they come to.

log          a CSV file with a schema              records   the rows of each log
slowdowns    what slowed the GPU meanwhile         ladders   the ladder's, summarised
ladder_runs  which of the ladder's runs is shown
"""
