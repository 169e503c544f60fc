"""`python tools/ladder.py` is `flashladder ladder`: see tools/commands/ladder.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
