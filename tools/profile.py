"""`python tools/profile.py` is `flashladder profile`: see tools/commands/profile.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
