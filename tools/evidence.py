"""`python tools/evidence.py` is `flashladder evidence`: see tools/commands/evidence.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
