"""The sweeps that readers of the field expect, each measured or counted, logged and drawn by tools/experiment.py.

sweeps    what each experiment runs          run       on the GPU, or on the emulator in its place
traffic   the papers' formulas               figures   the pictures
ladder    all rungs in one run, by tools/ladder.py
"""
