"""`python tools/timeline.py` is `flashladder timeline`: see tools/commands/timeline.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
