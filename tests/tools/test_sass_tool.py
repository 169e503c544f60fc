"""`flashladder sass` as a person types it."""

import csv

import pytest

from flashladder.common import console
from flashladder.tools.commands import sass


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr(console.console, "width", 160)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = console.run(sass.main, sass.parser(), arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def line(out, start):
    return next(line for line in out.splitlines() if line.strip().startswith(start)).split()


def test_one_rung(run):
    code, out, err = run("09")
    assert (code, err) == (0, "")
    assert "2 CTAs (8 warps) an SM, limited by registers" in out
    assert "4 warps do 1 block of K and V in one pass" in out
    assert line(out, "HMMA")[:3] == ["HMMA", "tensor", "256"]
    assert line(out, "tensor")[2:4] == ["4,194,304", "1,536"]
    assert "measured on an H100 SXM" in out.replace("\n", " ")
    assert "softmax.update(s, o);" in out


def test_another_gpu_and_configuration(run):
    _, out, _ = run("09", "--gpu", "a100", "--config", "block_m=64", "q_fragments=0")
    assert "sm_80 (NVIDIA A100" in out
    assert line(out, "HMMA")[2] == "128"


def test_a_mask_by_an_expression(run):
    words = ("--mask", "k <= q && table[k / 8] > h", "--tensor", "table=zeros:8:int32")
    code, out, _ = run("51", *words, "--config", "block_m=64", "--loop")
    assert code == 0
    assert "mods=table:int32[];mask=k<=q&&table[k/8]>h" in "".join(out.split())
    assert "LDG" in out, "the main loop of rung 51 reads the table"
    code, _, err = run("51", "--mask", "k <= p")
    assert (code, "no name p" in err) == (console.EXIT_ERROR, True)


def test_listing_of_the_main_loop(run):
    _, out, _ = run("02", "--loop", "--listing")
    listed = out[out.index(" addr  control") :].splitlines()[1:]
    instructions = int(line(out, "main loop")[2].replace(",", ""))
    assert len(listed) == instructions
    assert sum("HMMA.16816.F32.BF16" in row for row in listed) == 128
    assert "B------:R" in out
    assert "CS2R" not in out[out.index("Opcodes") :]  # of the prologue


def test_two_rungs(run):
    code, out, _ = run("08", "09", "--loop")
    assert code == 0
    assert "--- 08_fewer_address_ops/kernel.cu" in out
    assert "+    KOperand" in out.replace("\n", " ")
    before, after, change = line(out[out.index("Opcodes of the main loop") :], "IMAD.MOV")[1:]
    assert int(after) - int(before) == int(change) < 0
    assert "Opcodes of the kernel" not in out
    side_by_side = out[out.index("The main loop, registers' names aside") : out.index("Resources")]
    assert "equal" in side_by_side
    assert any(row.strip().startswith("+ ") for row in side_by_side.splitlines())
    assert "STG" not in side_by_side  # of the epilogue


def test_two_whole_kernels_side_by_side(run):
    _, out, _ = run("--diff", "03", "04", "--listing")
    side_by_side = out[out.index("The kernel, registers' names aside") : out.index("Resources")]
    assert "STG" in side_by_side  # of the epilogue


def test_two_rungs_of_one_kernel(run):
    _, out, _ = run("--diff", "06", "07")
    assert "Both are 06_fp32_throughput/kernel.cu; only the configuration differs." in out
    assert "block_n: 64 -> 128" in out


def test_counts_to_a_file(run, tmp_path):
    file = tmp_path / "counts.csv"
    code, _, _ = run("--diff", "08", "09", "--csv", str(file))
    assert code == 0
    rows = list(csv.DictReader(file.open()))
    hmma = {row["version"]: (row["pipe"], row["loop"]) for row in rows if row["kind"] == "HMMA"}
    assert hmma == {"08_fewer_address_ops": ("tensor", "256"), "09_fewer_moves": ("tensor", "256")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99"], "no version 99; there are 00_minimal"),
        (["07", "08", "09"], "sass shows one rung, or compares two, not 07, 08, 09"),
        (["--diff", "07", "08", "09"], "sass shows one rung, or compares two, not 07, 08, 09"),
        (["09", "--gpu", "v100"], "no description of the GPU v100; did you mean h100? There are a100"),
        (["09", "--config", "block_n=48"], "block_n=48 is not one of 32, 64, 128"),
        (["09", "--csv", "/nowhere/counts.csv"], "non-existent directory: '/nowhere'"),
    ],
)
def test_bad_input_is_refused_by_name(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == console.EXIT_ERROR
    assert message in err


def test_without_arguments_it_helps(run):
    code, out, _ = run()
    assert code == console.EXIT_ERROR
    assert "--diff LOWER UPPER" in out
