"""What a program asks of attention, what tuning for it gains, and how the winners are kept and used.

program.py runs a program under recorder.py, which notes its problems; demand.py is what it asked for; tuning.py
searches for that; gains.py times it; tables.py shows both; export.py is the folder of winners, which
FLASHLADDER_ADOPTED names; standing.py measures it again.
"""
