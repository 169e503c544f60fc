"""`python tools/run_version.py` is `flashladder run`: see tools/commands/run_version.py."""

if __name__ == "__main__":
    from door import enter

    enter("run")
