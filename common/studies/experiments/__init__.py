"""The sweeps that readers of the field expect, each measured or counted, logged and drawn by `flashladder experiment`.

sweeps    what each experiment runs          run       on the GPU, or on the emulator in its place
traffic   the papers' formulas               figures   the pictures
ladder    all rungs in one run, by `flashladder ladder`
"""
