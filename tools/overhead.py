"""`python tools/overhead.py` is `flashladder overhead`: see tools/commands/overhead.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
