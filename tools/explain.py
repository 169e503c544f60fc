"""`python tools/explain.py` is `flashladder explain`: see tools/commands/explain.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
