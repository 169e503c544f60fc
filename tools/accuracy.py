"""`python tools/accuracy.py` is `flashladder accuracy`: see tools/commands/accuracy.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
