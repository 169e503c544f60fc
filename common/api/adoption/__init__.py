"""What a program asks of attention, what tuning for it gains, and how the winners are kept and used.

program.py runs a program under recorder.py, which notes its problems; demand.py is what it asked for; gains.py times
that; tables.py shows both; export.py is the folder of winners, which FLASHLADDER_ADOPTED names; standing.py measures it
again. The tuner is not known here: the command adopt puts all together.
"""
