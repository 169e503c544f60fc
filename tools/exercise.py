"""`python tools/exercise.py` is `flashladder exercise`: see tools/commands/exercise.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
