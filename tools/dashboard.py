"""`python tools/dashboard.py` is `flashladder dashboard`: see commands/dashboard.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
