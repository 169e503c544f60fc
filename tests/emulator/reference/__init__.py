"""A second interpreter of PTX, written from the PTX ISA alone, to test the emulator by: one thread at a time, on
Python's integers, without a thought of speed. It shares no code with the emulator.

    numbers        floats as exact numbers, and their rounding
    instructions   what an instruction makes of its operands
    machine        threads, branches, memory, and what threads do together

Where PTX leaves a value open (which NaN, a division by zero) it takes some value; its users do not compare those.
"""

from .machine import UndefinedError, interpret

__all__ = ["UndefinedError", "interpret"]
