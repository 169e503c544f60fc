"""results/dashboard.html, from the CSV logs alone.

data   the logs as data frames       view     one GPU and type
page   the whole page                opcodes  counts the instructions of every rung
"""
