"""`python tools/doctor.py` is `flashladder doctor`: see tools/commands/doctor.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
