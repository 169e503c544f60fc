"""Writes RACES.md: the classes of races between Hopper's units, where each was seen, and how the emulator reports it.

`python tests/emulator/races_page.py` writes it anew, from classes.yaml and races_prose.md; test_proxies.py runs the
kernels of its table and compares the page.
"""

from pathlib import Path

import yaml

CLASSES = Path(__file__).with_name("classes.yaml")
PROSE = Path(__file__).with_name("races_prose.md")
PAGE = Path(__file__).with_name("RACES.md")

HEAD = """# Races between Hopper's asynchronous units, and how the emulator reports them

Each class is a bug that a public kernel shipped; class 12 is from the text of PTX. The kernels are those of
[proxies.cu](proxies.cu): the right one is silent, the wrong one is reported with both of its source lines, whether
copies land as late as PTX allows or as early. `python tests/emulator/races_page.py` writes this page from
[classes.yaml](classes.yaml); `test_proxies.py` runs every line of it.

| class | seen in | kernel of proxies.cu | found as |
|---|---|---|---|
"""


def page() -> str:
    """The text of RACES.md."""
    rows = []
    for number, each in yaml.safe_load(CLASSES.read_text()).items():
        seen = "; ".join(each["seen"]) or "PTX"
        for n, case in enumerate(each["cases"]):
            name = f"{number}. {each['title']} | {seen}" if n == 0 else " | "
            rows.append(f"| {name} | `{case['entry']}` | {case.get('error', 'RaceError')}: {case['says']} |\n")
    return HEAD + "".join(rows) + "\n" + PROSE.read_text()


if __name__ == "__main__":
    PAGE.write_text(page())
