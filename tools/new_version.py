"""`python tools/new_version.py` is `flashladder new`: see tools/commands/new_version.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
