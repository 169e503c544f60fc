"""`python tools/bench.py` is `flashladder bench`: see tools/commands/bench.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
