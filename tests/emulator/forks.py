"""Many mutations of a program are tried by one run of it: where the run first comes to the block of what is mutated, a
process forks off that goes on with the mutated program. What ran before is the same with and without the mutation."""

import gc
import os
import traceback
from dataclasses import replace

from flashladder.common.emulator.compile.blocks import writes
from flashladder.common.emulator.mutate import mutated
from flashladder.common.errors import EmulatorError

FOUND, MISSED, BROKEN = 0, 1, 2  # how a fork ends


def tried(run, program, mutations, expected):
    """The results of a run without a mutation, and the names of those of the mutations, by name, that it misses: with
    one it reports nothing and has the `expected` results.

    `run` takes a program and what emulator.run calls as `entering`; what it returns is compared.
    """
    trunk = _with_room(program, mutations.values())
    block_of = {i.index: block.index for block in trunk.blocks for i in block.instructions}
    waiting, missed, is_fork = {}, [], False
    for name, mutation in mutations.items():
        waiting.setdefault(block_of[mutation.instruction.index], []).append(name)

    def entering(block):
        nonlocal is_fork
        for name in waiting.pop(block, ()):
            if (process := os.fork()) == 0:
                is_fork = True
                waiting.clear()
                _become(trunk, mutated(trunk, mutations[name]))
                return
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            assert status in (FOUND, MISSED), f"{name}: the fork ended with {status}"
            missed.extend([name] * (status == MISSED))

    status = BROKEN
    gc.freeze()  # a fork that collects garbage would copy all pages
    try:
        results = run(trunk, entering)
        status = MISSED if results == expected else FOUND
    except EmulatorError:
        status = FOUND
        if not is_fork:
            raise
    except BaseException:
        traceback.print_exc()
        if not is_fork:
            raise
    finally:
        if is_fork:
            os._exit(status)
        gc.unfreeze()
    return results, missed + [name for left in waiting.values() for name in left]


def _with_room(program, mutations):
    """The program, a copy that can be changed, with a place for each register that a mutation brings."""
    slots = dict(program.slots)
    for reg in (reg for mutation in mutations for each in mutation.substitutes for reg in writes(each)):
        slots.setdefault(reg, len(slots))
    return replace(program, slots=slots, blocks=list(program.blocks), functions=list(program.functions))


def _become(program, other):
    """Changes a program that runs, so that it goes on as another with the same blocks."""
    program.blocks[:], program.functions[:] = other.blocks, other.functions
    vars(program).pop("polls", None)  # is found out again
