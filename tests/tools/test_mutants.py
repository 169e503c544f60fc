"""Which mutants there are of a file; that a run finds what it should, only the run itself shows."""

import ast

import pytest

from flashladder.tests.mutants.changes import choose, mutants

PYTHON = '''"""1 < 2"""
def f(a: "int | None", b=2) -> "x + y":
    if not a < b:
        raise ValueError(f"{a + 1}")
    return g(a, b) if a and b else 2**b  # é
'''
OF_PYTHON = {
    'def f(a: "int | None", b=3) -> "x + y":',
    "if (not (not a < b)):",
    "if (a < b):",
    "if not a <= b:",
    "pass",
    "return g(b, a) if a and b else 2**b # é",
    "return g(a, b) if (not (a and b)) else 2**b # é",
    "return g(a, b) if a or b else 2**b # é",
    "return g(a, b) if a and b else 2*b # é",
    "return g(a, b) if a and b else 3**b # é",
}
DEVICE = """#include "a1.cuh"  // 1 + 1
template <int n = 1>
__device__ void f(vector<int> a) {
    for (int i = 0; i < n; ++i) store(a.at(i), max(n - i, 0));  // é > 1
    ring.wait(at);
    asm("bar.sync 0;");
}
"""
OF_DEVICE = {
    "for (int i = 1; i < n; ++i) store(a.at(i), max(n - i, 0)); // é > 1",
    "for (int i = 0; i <= n; ++i) store(a.at(i), max(n - i, 0)); // é > 1",
    "for (int i = 0; i < n; ++i) store(a.at(i), min(n - i, 0)); // é > 1",
    "for (int i = 0; i < n; ++i) store(a.at(i), max(n + i, 0)); // é > 1",
    "for (int i = 0; i < n; ++i) store(a.at(i), max(n - i, 1)); // é > 1",
    "(nothing)",
}


@pytest.mark.parametrize(("name", "text", "expected"), [("a.py", PYTHON, OF_PYTHON), ("a.cuh", DEVICE, OF_DEVICE)])
def test_mutants_of_a_file(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text)
    found = list(mutants(tmp_path, tmp_path / name))
    assert {mutant.new_line for mutant in found} == expected
    assert len(found) == len(expected)
    if name.endswith(".py"):
        for mutant in found:
            ast.parse(mutant.applied(text.encode()))


def test_other_lines_leave_the_choice_as_it_is(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(PYTHON)
    chosen = [mutant.name for mutant in choose(tmp_path, [path], 4, seed=1)]
    path.write_text(f"import os\n\n{PYTHON}")
    assert [mutant.name for mutant in choose(tmp_path, [path], 4, seed=1)] == chosen
    assert [mutant.name for mutant in choose(tmp_path, [path], 4, seed=2)] != chosen
