"""`python tools/sass.py` is `flashladder sass`: see tools/commands/sass.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
