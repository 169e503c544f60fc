"""`python tools/model.py` is `flashladder model`: see tools/commands/model.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
