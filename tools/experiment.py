"""`python tools/experiment.py` is `flashladder experiment`: see tools/commands/experiment.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
