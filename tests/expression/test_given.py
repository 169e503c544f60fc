"""Tensors as a command line gives them."""

import numpy as np
import pytest
import torch

from flashladder.common.errors import ConfigError
from flashladder.common.expression import Declared, given


def test_each_form(tmp_path):
    np.save(tmp_path / "image.npy", np.arange(6, dtype=">i4").reshape(2, 3))
    found = given.tensors(
        [
            f"image={tmp_path}/image.npy",
            "far=64",
            "scale=-0.5",
            "own=arange:2,3",
            "on=ones:4:bool",
            "off=zeros:1:int8",
            "much=1" + "0" * 20,
        ]
    )
    wanted = {
        "image": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "far": torch.tensor(64),
        "scale": torch.tensor(-0.5),
        "own": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "on": torch.ones(4).bool(),
        "much": torch.tensor(1e20),  # beyond 64 bits
        "off": torch.zeros(1, dtype=torch.int8),
    }
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_random_ones_are_those_of_the_seed():
    words = ["slope=random:2,64", "kind=random:64:int32", "flag=random:64:bool"]
    slope, kind, flag = given.tensors(words, seed=1).values()
    assert slope.shape == (2, 64)
    assert slope.dtype == torch.float32
    assert slope.min() < 0 < slope.max()
    assert set(kind.tolist()) >= {0, 1}
    assert kind.min() == 0
    assert 0 < flag.sum() < 64
    assert torch.equal(slope, given.tensors(words, seed=1)["slope"])
    assert not torch.equal(slope, given.tensors(words, seed=2)["slope"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["image"], "image is no tensor: NAME=FILE.npy"),
        (["image="], "image= is no tensor"),
        (["=3"], "=3 is no tensor"),
        (["image=few"], "image=few is no tensor"),
        (["a=1", "a=2"], "a is given twice"),
        (["a=rando:3"], "a=rando:3: no rando; did you mean random?"),
        (["a=ones:3:int3"], "no dtype int3; did you mean int32?"),
        (["a=ones:0"], "SIZES are whole numbers, 1 or more"),
        (["a=ones:2,-1"], "SIZES are whole numbers, 1 or more"),
        (["a=ones:3:fp32:4"], "SIZES are whole numbers, 1 or more"),
        (["a=ones:99999,99999"], "of 268,435,456 elements in all"),
    ],
)
def test_what_is_no_tensor(words, said):
    with pytest.raises(ConfigError) as refused:
        given.tensors(words)
    assert said in str(refused.value)


def test_a_file_that_is_no_tensor(tmp_path):
    path = tmp_path / "image.npy"
    for write in (lambda: path.write_bytes(b"text"), lambda: np.save(path, np.array([{}]), allow_pickle=True)):
        write()
        with pytest.raises(ConfigError, match="numpy and torch read no tensor there"):
            given.tensors([f"image={path}"])
    with pytest.raises(FileNotFoundError):
        given.tensors(["image=none.npy"])


def test_tensors_as_kernels_are_compiled_for_them():
    found = given.declared({"a": torch.zeros(2, 3).bfloat16(), "b": torch.tensor(True)})
    assert found == [Declared("a", "bf16", 2), Declared("b", "bool", 0)]
    with pytest.raises(ConfigError, match=r"c is torch\.complex64; expressions read bool, uint8"):
        given.declared({"c": torch.zeros(1, dtype=torch.complex64)})
