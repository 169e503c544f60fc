"""`python tools/packed.py` is `flashladder packed`: see tools/commands/packed.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
