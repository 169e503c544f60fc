"""The logs: append-only CSV files that survive damage, what their rows hold, and what they come to.

log   a CSV file with a schema          records   the rows of each log          ladders   the ladder's, summarised
"""
