"""Masks and scores as text: parsed into typed trees, from which the kernel's text is printed, and nothing else.

    mask="k <= q || image[q] == image[k]"
    score="s + slope[h] * (k - q)"

What runs everywhere needs no torch; evaluate.py, which does, is the exact reference.
"""

from __future__ import annotations

from flashladder.common.expression import parse
from flashladder.common.expression.mods import Mods
from flashladder.common.expression.text import c, normal
from flashladder.common.expression.tree import Declared, Node, Type, names, walk

__all__ = ["Declared", "Mods", "Node", "Type", "c", "names", "normal", "parse", "walk"]
