"""`python tools/adopt.py` is `flashladder adopt`: see tools/commands/adopt.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
