"""`python tools/picture.py` is `flashladder picture`: see tools/commands/picture.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
