"""Where kernels run: what is chosen, and what does not fit."""

from types import SimpleNamespace

import pytest
import torch

from flashladder.common.errors import ConfigError, UnsupportedProblemError
from flashladder.common.problem.config import KernelConfig, load_gpu
from flashladder.common.runtime import device as devices
from flashladder.common.runtime import target
from flashladder.tests.support.cards import H100, card


@pytest.fixture
def here(monkeypatch):
    """Makes this machine have a GPU, or none."""

    def have(found=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: found is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: found.name)
        monkeypatch.setattr(devices, "present", lambda: found)

    return have


def test_the_gpu_that_is_here(here, capsys):
    here(H100)
    place = target.resolve("auto", None)
    assert (place.on_gpu, place.arch, place.title) == (True, "sm_90a", "NVIDIA H100 80GB HBM3")
    assert place.gpu == load_gpu("h100")
    assert not capsys.readouterr().err


def test_a_gpu_that_nobody_described_is_measured_and_said_so_once(here, capsys):
    here(card("NVIDIA Of Tomorrow", 200, 300, arch="sm_110a"))
    target._say_once.cache_clear()
    place = target.resolve("auto", None)
    assert (place.arch, place.gpu.num_sms, place.gpu.name) == ("sm_110a", 200, "of-tomorrow-200sm")
    target.resolve("gpu", None)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("NVIDIA Of Tomorrow (measured from its own attributes; unknown to configs/gpus)") == 1


def test_without_one_the_emulator_stands_for_an_h100_or_another(here):
    here()
    assert target.resolve("auto", None) == target.Target(False, "sm_90a", load_gpu("h100"))
    assert target.resolve("auto", "a100").arch == "sm_80"
    assert target.resolve("emulator", "a100").title == "emulator (as NVIDIA A100 SXM4 80 GB)"


def test_another_gpu_than_the_one_asked_for_is_said_so(here, capsys):
    here(H100)
    assert target.resolve("auto", "a100").arch == "sm_90a"
    message = capsys.readouterr().err
    assert "the GPU here is NVIDIA H100 80GB HBM3, not NVIDIA A100" in message
    assert "--device emulator runs the code of a100" in message
    target.resolve("auto", "h100")
    assert not capsys.readouterr().err
    assert target.resolve("emulator", "a100").arch == "sm_80"


def test_an_unknown_gpu(here):
    here()
    with pytest.raises(ConfigError, match="no description of the GPU h900"):
        target.resolve("auto", "h900")


def test_a_kernel_that_does_not_fit_is_refused(here):
    here()
    kernels = [SimpleNamespace(launch=SimpleNamespace(shared_bytes=needed)) for needed in (0, 150_000)]
    artifact = SimpleNamespace(version="02_swizzling", config=KernelConfig.of(block_m=128), kernels=kernels)
    target.resolve("emulator", "h100").check(artifact)
    with pytest.raises(UnsupportedProblemError, match=r"needs 150000 bytes .* rtx3090 gives a CTA 101376"):
        target.resolve("emulator", "rtx3090").check(artifact)
