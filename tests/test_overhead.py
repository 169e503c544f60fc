"""tools/overhead.py on a stand-in for a GPU: which calls it times, and that it shows each beside torch's."""

import re

import fake_cuda
import pytest
import torch

from flashladder.common import console, problem
from flashladder.common.attention import op
from flashladder.common.errors import DeviceError
from flashladder.common.run import gpu, quick
from flashladder.tools.commands import overhead


@pytest.fixture
def run(monkeypatch, capsys):
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(op, "_ready", {})
    monkeypatch.setattr(op, "is_gpu", lambda tensor: True)
    drawn = problem.make_inputs
    monkeypatch.setattr(problem, "make_inputs", lambda asked, device: drawn(asked))
    counted = []
    monkeypatch.setattr(quick, "load", lambda: None)
    monkeypatch.setattr(quick, "missing", "made up")
    monkeypatch.setattr(gpu, "host_cost_us", lambda call: counted.append(call()) or 2.0 * len(counted))

    def call(*arguments):
        code = console.run(overhead.main, overhead.parser(), [*arguments])
        return code, capsys.readouterr().out

    return call


def test_each_way_to_call_beside_torch(run):
    code, out = run("24", "--seqlen", "16", "--heads", "2", "--head-dim", "64")
    assert code == 0
    rows = re.findall(r"^ +(\S.*?) {2,}(\S+) +(\S+) *$", out, re.MULTILINE)
    assert [row for row in rows if row[0].split()[0] != "call"][:5] == [
        ("scaled_dot_product_attention", "2.0", "1.00"),
        ("24", "4.0", "2.00"),
        ("24, out=", "6.0", "3.00"),
        ("24, return_lse=True", "8.0", "4.00"),
        ("24, as torch.compile calls it", "10.0", "5.00"),
    ]
    assert [row[0] for row in rows[-2:]] == ["24, in Python", "24, a new length"]
    assert "calls go through Python: made up" in out
    assert re.search(r"first call of 24: \d+\.\d\d s", out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(DeviceError):
        overhead.main(overhead.parser().parse_args([]))


@pytest.mark.gpu
@pytest.mark.alone
def test_what_a_call_costs(capsys):
    assert console.run(overhead.main, overhead.parser(), []) == 0
    with capsys.disabled():
        print(capsys.readouterr().out)
