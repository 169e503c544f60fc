"""Kernels of two commits: what counts as the same machine code, and the command that says so."""

import dataclasses
import re
import shutil
import subprocess

import pytest

from flashladder.common import console
from flashladder.common.catalog import find
from flashladder.common.compiler import BuildRequest, build_one
from flashladder.common.compiler.sass.allocation import first_exchange
from flashladder.common.compiler.sass.commits import Verdict, first_difference, first_move, sides
from flashladder.common.compiler.sass.flow import Graph
from flashladder.common.compiler.sass.instruction import disassemble_functions
from flashladder.common.compiler.sass.registers import operands_of, results_of
from flashladder.common.errors import ConfigError
from flashladder.common.paths import CUDA_HEADERS, ROOT
from flashladder.common.report import sass_commits as show
from flashladder.tests.support.tiny_ladder import HELPER, KERNEL, make_rung
from flashladder.tools.commands import sass


def git(repository, *arguments):
    name = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    subprocess.run(["git", "-C", str(repository), *name, *arguments], check=True, capture_output=True)


@pytest.fixture
def ladder(tmp_path):
    """A repository whose working tree changed since its one commit: a kernel of each fate."""
    root = tmp_path / "versions"
    for name in ("01_changed", "02_reworded", "03_kept", "04_broken"):
        make_rung(root, name)
    shutil.copytree(CUDA_HEADERS, tmp_path / "common" / "cuda")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "First")
    make_rung(root, "01_changed", body="params.lse[blockIdx.x] = 2.0f;")
    reworded = HELPER.replace("constant", "one")
    make_rung(root, "02_reworded", kernel=KERNEL.replace("= constant;", "= one;"), helper=reworded)
    make_rung(root, "04_broken", body="return 1;")
    make_rung(root, "05_new")
    return root


def requests(root, *names):
    return [BuildRequest(version, version.config(), "sm_80") for version in (find(name, root) for name in names)]


def compare(root, *names, head=None):
    with sides(requests(root, *names), "HEAD", head, root.parent) as both:
        return {each.request.version.number: each for each in both.compare()}


@pytest.mark.git
def test_a_rung_is_found_where_it_lay_before_its_ladder_had_a_folder(tmp_path):
    rung = make_rung(tmp_path / "versions", "03_kept")
    shutil.copytree(CUDA_HEADERS, tmp_path / "common" / "cuda")
    rung.directory.rename(tmp_path / "versions" / "03_kept")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "First")
    (tmp_path / "versions" / "03_kept").rename(rung.directory)
    assert compare(rung.root, "03")["03"].verdict == Verdict.IDENTICAL


@pytest.mark.git
@pytest.mark.slow
def test_each_kernel_has_its_verdict(ladder):
    found = compare(ladder, "01", "02", "03", "04", "05")
    assert {number: each.verdict for number, each in found.items()} == {
        "01": Verdict.CHANGED,
        "02": Verdict.IDENTICAL,
        "03": Verdict.IDENTICAL,
        "04": Verdict.FAILED,
        "05": Verdict.NEW,
    }
    changed = found["01"]
    assert changed.after.instructions > changed.before.instructions
    assert dict(changed.counts)["STG"] == 1
    assert re.match(r"instruction \d+: .* -> .*", changed.detail)
    assert found["04"].detail.startswith("after: ")
    assert "error" in found["04"].detail
    assert [each.is_same for each in found.values()] == [False, True, True, False, True]
    assert show.summary(list(found.values())) == ("5 kernels: 2 identical, 1 new, 1 differs, 1 does not compile")


@pytest.mark.git
def test_two_commits_whatever_lies_in_the_working_tree(ladder):
    assert compare(ladder, "01", head="HEAD")["01"].verdict is Verdict.IDENTICAL


@pytest.mark.git
def test_headers_are_the_commits_own(ladder):
    header = ladder.parent / "common" / "cuda" / "params.cuh"
    header.write_text(header.read_text() + "#define BODY_OF_THE_TREE\n")
    kernel = ladder / "forward" / "03_kept" / "kernel.cu"
    text = kernel.read_text().replace(
        "= constant;", "= constant;\n#ifdef BODY_OF_THE_TREE\n    params.lse[99] = 3;\n#endif"
    )
    kernel.write_text(text)
    git(ladder.parent, "add", kernel)
    git(ladder.parent, "commit", "-m", "The kernel alone")
    assert compare(ladder, "03")["03"].verdict is Verdict.CHANGED


@pytest.mark.git
def test_what_was_compiled_is_kept(ladder):
    with sides(requests(ladder, "02"), "HEAD", None, ladder.parent) as both:
        list(both.compare())
        assert (both.requests[0].version.number, both.to_compile) == ("02", 0)


@pytest.mark.git
def test_no_such_commit(ladder):
    with pytest.raises(ConfigError, match="git gives no kernels of nowhere"), sides([], "nowhere", None, ladder.parent):
        pass


@pytest.fixture(scope="module")
def code():
    """The instructions of a kernel with loops and branches."""
    version = find("25")
    return disassemble_functions(build_one(version, version.config(), "sm_90a").cubin)["attention_forward"]


def with_operands(code, changes):
    return [dataclasses.replace(each, operands=changes.get(n, each.operands)) for n, each in enumerate(code)]


def local_values(code):
    """Values of one register that begin and end within a block, as lists of the instructions that name it."""
    numbers = {each.address: n for n, each in enumerate(code)}
    for block in Graph.of(code).blocks:
        body = block.instructions
        for start, first in enumerate(body):
            if first.guard or len(results_of(first)) != 1:
                continue
            (register,) = results_of(first)
            end = next((n for n in range(start + 1, len(body)) if register in results_of(body[n])), None)
            if end is None or body[end].guard:
                continue
            named = [first, *(each for each in body[start + 1 : end + 1] if register in operands_of(each))]
            if all(names(each, other) for each in named for other in operands_of(each) | results_of(each)):
                yield register, [numbers[each.address] for each in named]


def names(instruction, register):
    """Whether it names the register itself, not as one of several."""
    return bool(re.search(rf"\bR{register}\b(?!\.64)", " ".join(instruction.operands)))


def renamed(instruction, operands, register, new, where):
    """The operands with another register, either where the result is, or where it is read."""
    no_predicates = (n for n, operand in enumerate(operands) if not re.match(r"U?P(\d|T)$", operand))
    result = next(no_predicates) if results_of(instruction) else None
    return tuple(
        re.sub(rf"\bR{register}\b", f"R{new}", operand) if (n == result) == (where == "result") else operand
        for n, operand in enumerate(operands)
    )


def test_another_allocation_is_no_difference(code):
    """Every value that lives within a block is kept in a register of its own, as no renaming of whole registers can."""
    changes = dict(enumerate(each.operands for each in code))
    values = list(local_values(code))
    for new, (register, (first, *uses)) in enumerate(values, 300):
        changes[first] = renamed(code[first], changes[first], register, new, "result")
        for use in uses:
            changes[use] = renamed(code[use], changes[use], register, new, "read")
    other = with_operands(code, changes)
    assert len(values) > 20
    assert first_difference({"f": code}, {"f": other}) is None
    assert first_move({"f": code}, {"f": other}) is None


def test_an_exchange_of_operands_is_a_move(code):
    swapped = {}
    for n, each in enumerate(code):
        if each.base in ("FADD", "FFMA", "FMUL"):
            result, a, b, *rest = each.operands
            if a != b and all(re.fullmatch(r"R\d+", operand) for operand in (a, b)):
                swapped[n] = result, b, a, *rest
    some = [*swapped.items()][:: len(swapped) // 8]
    assert len(some) >= 8
    assert all(first_exchange(code, with_operands(code, {n: operands})) == n for n, operands in some)


def test_a_result_that_nobody_reads_is_a_move(code):
    """A value is written to another register than the one that is read behind it."""
    n, each = next((n, each) for n, each in enumerate(code) if each.base == "MUFU" and not each.guard)
    other = with_operands(code, {n: ("R251", *each.operands[1:])})
    assert first_difference({"f": code}, {"f": other}) is None
    assert "reads another value" in first_move({"f": code}, {"f": other})


@pytest.mark.git
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")
def test_the_command(capsys):
    assert console.run(sass.main, sass.parser(), ["00", "--commits", "HEAD"]) == 0
    out = capsys.readouterr().out
    assert "1 kernels at HEAD and in the working tree" in out
    assert "1 kernels: 1 identical" in out
    assert console.run(sass.main, sass.parser(), ["00", "--commits", "a", "b", "c"]) == console.EXIT_ERROR
    assert "--commits takes BASE, or BASE and HEAD" in capsys.readouterr().err
