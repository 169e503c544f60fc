"""What a kernel will cost, what keeps it from being faster, and how far the GPU agrees.

One simulation stands behind every prediction; the modules ask it different questions.

subcore     How many cycles does a pass through these instructions take? Four sub-cores of an SM are alike, so one is
            simulated: its warps issue in order, and wait for the compiler's stall counts, for scoreboards, pipes,
            barriers and copies. Bank conflicts, which the machine code does not show, are a factor that is given.
tile        How many cycles does a tile of rows of Q take in a kernel of warpgroup products? There copies by TMA, the
            queue of products and the code around the loop decide, so the whole way through a tile is simulated.
cost        How many microseconds does a kernel take for a problem on a GPU? From the pass or the tile to waves of CTAs
            on all SMs, at the clock that is left. The emulator gives the factor of bank conflicts. The tuner ranks
            configurations by it, and a run without a GPU shows it.
outlook     What would a run take on a GPU that is not here, in words?
limits/     What keeps a kernel from being faster? `predicted`: the loop is simulated with and without each kind of
            instruction, with more passes than cost takes, and with what other instructions cost beside mmas on the
            GPUs where that was measured. `sampled`: where ncu's samples on a GPU say that warps wait.
ncu         What does Nsight Compute count on a GPU?          profiling   a rung under ncu, logged
agreement   How far are counters of the emulator and of the machine code from ncu's, predicted orders from measured?

Which to trust: the order of kernels of one kind before their times, and a time before what a limit is worth.
docs/cost-model.md says how each was held against GPUs. Without a GPU only the emulator and the machine code are needed.

subcore and tile know no problem and no GPU but its rates. cost and limits know problems and artifacts. None knows the
tuner, which asks `cost` for prices and decides by itself what to compile and to measure.
"""
