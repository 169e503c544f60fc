"""`python tools/ring.py` is `flashladder ring`: see tools/commands/ring.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
