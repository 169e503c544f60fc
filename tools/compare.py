"""`python tools/compare.py` is `flashladder compare`: see tools/commands/compare.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
