"""Exercises: a rung with its idea taken out, a task, hints, and a grade by the emulator and the machine code.

exercise   what versions/LADDER/NN/exercise.yaml declares       measures   the figures that a goal may be set in
grading    is it right, has it races, is the goal reached
page       what a person reads of it                            masks      an exercise of no rung: a cheaper mask
"""

from flashladder.common.workshop.exercises.exercise import FILE, Exercise, exercises, find
from flashladder.common.workshop.exercises.grading import Grade, grade
from flashladder.common.workshop.exercises.measures import MEASURES, Measure

__all__ = ["FILE", "MEASURES", "Exercise", "Grade", "Measure", "exercises", "find", "grade"]
