"""`python tools/neighbours.py` is `flashladder neighbours`: see tools/commands/neighbours.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
