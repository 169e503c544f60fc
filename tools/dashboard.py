"""`python tools/dashboard.py` is `flashladder dashboard`: see tools/commands/dashboard.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
