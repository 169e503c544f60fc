"""`python tuner/search.py` is `flashladder search`: see tools/commands/search.py."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
    from door import enter

    enter("search")
