"""`python tools/neighbours.py` is `flashladder neighbours`: see commands/neighbours.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
