"""`flashladder overhead` on a stand-in for a GPU: which calls it times, and that it shows each beside torch's."""

import re

import pytest
import torch

from flashladder.common import console
from flashladder.common.errors import DeviceError
from flashladder.common.problem import inputs
from flashladder.common.runtime import fast_path, gpu
from flashladder.tests.support import fake_cuda
from flashladder.tools.commands import overhead


def in_order(calls):
    """As if each call took two microseconds more than the one before."""
    return {name: (call(), 2.0 * number)[1] for number, (name, call) in enumerate(calls.items(), start=1)}


@pytest.fixture
def run(monkeypatch, capsys):
    fake_cuda.for_attention(monkeypatch)
    drawn = inputs.make_inputs
    monkeypatch.setattr(inputs, "make_inputs", lambda asked, device: drawn(asked))
    monkeypatch.setattr(fast_path, "load", lambda: None)
    monkeypatch.setattr(fast_path, "missing", "made up")
    monkeypatch.setattr(gpu, "host_costs_us", in_order)

    def call(*arguments):
        code = console.run(overhead.main, overhead.parser(), [*arguments])
        return code, capsys.readouterr().out

    return call


def test_each_way_to_call_beside_torch(run):
    code, out = run("24", "--seqlen", "16", "--heads", "2", "--head-dim", "64")
    assert code == 0
    rows = re.findall(r"^ +(\S.*?) {2,}(\S+) +(\S+) *$", out, re.MULTILINE)
    rows = [row for row in rows if row[0].split()[0] != "call"]
    assert rows[:5] == [
        ("scaled_dot_product_attention", "2.0", "1.00"),
        ("24", "4.0", "2.00"),
        ("24, out=", "6.0", "3.00"),
        ("24, return_lse=True", "8.0", "4.00"),
        ("24, as torch.compile calls it", "10.0", "5.00"),
    ]
    assert [row[0] for row in rows[5:7]] == ["24, in Python", "24, a new length"]
    assert [row[0].removeprefix("flash_attn_with_kvcache") for row in rows[-10:]] == [
        "scaled_dot_product_attention",
        "attention",
        "",
        ", return_softmax_lse=True",
        ", num_splits=4",
        ", paged",
        ", new keys",
        ", paged, new keys",
        ", 8-bit floats",
        ", a length of the host",
    ]
    assert rows[-14:-10] == [
        ("scaled_dot_product_attention", "2.0", "1.00"),
        ("24", "4.0", "2.00"),
        ("scaled_dot_product_attention, inputs want gradients", "6.0", "3.00"),
        ("attention(), inputs want gradients", "8.0", "4.00"),
    ]
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


def test_calls_take_turns(monkeypatch):
    """So that none alone bears the cost of a CPU that is not awake yet, which is not counted."""
    order = []

    def call(name, seconds):
        order.append(name)
        later = gpu.time.perf_counter() + seconds
        monkeypatch.setattr(gpu.time, "perf_counter", lambda: later)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("|"))
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: 0.0)
    for name, value in {"BATCH": 2, "ROUNDS": 3, "WARMUP_ROUNDS": 1}.items():
        monkeypatch.setattr(gpu, name, value)
    costs = gpu.host_costs_us({"a": lambda: call("a", 100 if len(order) < 6 else 1), "b": lambda: call("b", 3)})
    assert "".join(order) == "|aa|bb" * 4 + "|"
    assert costs == {"a": 1e6, "b": 3e6}
