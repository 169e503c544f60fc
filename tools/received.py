"""`python tools/received.py` is `flashladder received`: see tools/commands/received.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
