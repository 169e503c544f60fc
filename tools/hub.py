"""`python tools/hub.py` is `flashladder hub`: see tools/commands/hub.py."""

if __name__ == "__main__":
    from door import enter

    enter(__file__)
