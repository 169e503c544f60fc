"""A program that looks for a better configuration, with the lab as its judge; no GPU is needed.

Each answer says whether the kernel is right, races and in which lines, what it spills, and how long it takes: timed on
a GPU, elsewhere predicted. What is wrong is not compared. A real program would choose the next ten by these answers.
"""

import itertools

from flashladder.tools.commands import ask

FIELDS = ("block_n", "num_warps", "q_fragments")
TRIALS = [*itertools.product((32, 64), (4, 8), (0, 2, 4))][:10]
SMALL = ("--seqlen", "128", "--heads", "1", "--no-log")

found = []
for values in TRIALS:
    config = [f"{name}={value}" for name, value in zip(FIELDS, values, strict=True)]
    answer = ask("run", "02", *SMALL, "--config", *config)
    if not answer.right:
        print(f"{' '.join(config)}: {answer.reason}")
        for fault in answer.faults:
            print("".join(f"  {place.file}:{place.line}" for place in fault.places))
        continue
    (kernel,) = (each for each in answer.kernels if each.name == "02")
    time = kernel.time
    assert time is not None
    print(f"{' '.join(config)}: {time.basis} {time.value:.1f} {time.unit}, {kernel.spill_bytes} bytes of spills")
    found.append((time.value, config))

print("the best of them:", *min(found)[1])
