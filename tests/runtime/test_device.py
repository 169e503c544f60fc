"""GPUs are told apart by name, SMs and memory; one that nobody described is described by its own attributes."""

from types import SimpleNamespace

import pytest
import torch

from flashladder.common.catalog import winners
from flashladder.common.compiler.sass import occupancy_of, throughput
from flashladder.common.compiler.sass.pipes import tensor_peak
from flashladder.common.errors import DeviceError
from flashladder.common.problem.config import gpu_names, load_gpu
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import device
from flashladder.tests.support.cards import H100, card

# As drivers report them: names, SMs, GiB.
CARDS = {
    "a100": [("NVIDIA A100-SXM4-80GB", 108, 79.3)],
    "a100-40": [("NVIDIA A100-SXM4-40GB", 108, 39.4), ("NVIDIA A100-PCIE-40GB", 108, 39.4)],
    "a100-pcie": [("NVIDIA A100 80GB PCIe", 108, 79.3)],
    "a800": [("NVIDIA A800-SXM4-80GB", 108, 79.3)],
    "a6000": [("NVIDIA RTX A6000", 84, 47.5)],
    "rtx3090": [("NVIDIA GeForce RTX 3090", 82, 23.7)],
    "rtx3090ti": [("NVIDIA GeForce RTX 3090 Ti", 84, 23.7)],
    "rtx4090": [("NVIDIA GeForce RTX 4090", 128, 23.6)],
    "rtx4090d": [("NVIDIA GeForce RTX 4090 D", 114, 23.6)],
    "rtx5090": [("NVIDIA GeForce RTX 5090", 170, 31.4)],
    "rtx6000ada": [("NVIDIA RTX 6000 Ada Generation", 142, 47.5)],
    "l4": [("NVIDIA L4", 58, 22.0)],
    "l40s": [("NVIDIA L40S", 142, 44.4)],
    "h100": [("NVIDIA H100 80GB HBM3", 132, 79.1)],
    "h100-pcie": [("NVIDIA H100 PCIe", 114, 79.1)],
    "h100-nvl": [("NVIDIA H100 NVL", 132, 92.6)],
    "h800": [("NVIDIA H800", 132, 79.1)],
    "h20": [("NVIDIA H20", 78, 95.0)],
    "h200": [("NVIDIA H200", 132, 139.8)],
    "gh200": [("NVIDIA GH200 480GB", 132, 94.5)],
    "b200": [("NVIDIA B200", 148, 178.35)],
    "b300": [("NVIDIA B300 SXM6 AC", 148, 267.7)],
}
STRANGERS = [
    ("NVIDIA H100 80GB HBM3", 114, 79.1),  # a name alone is no card
    ("NVIDIA H100 80GB HBM3", 132, 64.0),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 39.5),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 14, 9.5),
    ("NVIDIA A100-SXM4-80GB", 42, 39.3),  # a slice whose driver keeps the name
    ("NVIDIA A100-SXM-64GB", 124, 63.4),
    ("NVIDIA H200 NVL", 132, 139.8),
    ("NVIDIA GH200 144G HBM3e", 132, 139.8),
    ("NVIDIA H20-3e", 78, 139.8),
    ("NVIDIA L40", 142, 44.4),
    ("NVIDIA RTX 6000", 142, 47.5),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, 15.7),
    ("NVIDIA GB200", 152, 184.0),
    ("NVIDIA Of Tomorrow", 200, 300.0),
]


def test_every_described_gpu_has_a_made_up_device():
    assert sorted(CARDS) == gpu_names()


@pytest.mark.parametrize("gpu", gpu_names())
def test_a_described_gpu_is_recognised(gpu):
    assert {name for name, _, _ in CARDS[gpu]} == set(load_gpu(gpu).names)
    for facts in CARDS[gpu]:
        found = device.describe(card(*facts))
        assert found.name == gpu
        assert device.is_known(found)


@pytest.mark.parametrize("facts", STRANGERS)
def test_what_is_not_described_is_measured(facts):
    found = device.describe(card(*facts))
    assert not device.is_known(found)
    assert found.title == f"{facts[0]} (measured from its own attributes; unknown to configs/gpus)"
    assert (found.num_sms, found.l2_bytes, found.boost_mhz) == (facts[1], 7 * 2**20, 1980)
    assert found.bandwidth_gb_s == 512
    assert found.sources


def test_cards_of_one_name_and_different_sms_have_different_tuned_files():
    names = {device.describe(card(*facts)).name for facts in STRANGERS}
    assert len(names) == len(STRANGERS)
    assert "a100-sxm4-80gb-mig-1g-10gb-14sm" in names


def test_figures_without_a_source_of_their_own_give_way_to_the_device_s():
    gpu = load_gpu("h20")
    assert gpu.unconfirmed == ("l2_bytes", "boost_mhz")
    found = device.describe(card("NVIDIA H20", 78, 95.0, clock_mhz=1830))
    assert (found.l2_bytes, found.boost_mhz) == (7 * 2**20, 1830)
    assert found.bandwidth_gb_s == gpu.bandwidth_gb_s, "a confirmed figure stays"
    silent = device.describe(card("NVIDIA H20", 78, 95.0, clock_mhz=0))
    assert silent.boost_mhz == gpu.boost_mhz, "a driver that does not say leaves it"


@pytest.mark.parametrize(
    ("name", "arch", "flops"),
    [
        ("NVIDIA A30", "sm_80", 2048),
        ("NVIDIA A10", "sm_86", 1024),
        ("NVIDIA GeForce RTX 3080", "sm_86", 512),
        ("NVIDIA GeForce RTX 4080", "sm_89", 512),
        ("NVIDIA H200 NVL", "sm_90a", 4096),
        ("NVIDIA GB200", "sm_100a", 8192),
        ("NVIDIA GB300", "sm_103a", 8192),
        ("NVIDIA Of Tomorrow", "sm_110a", 8192),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120a", 1024),
        ("NVIDIA GeForce RTX 5080", "sm_120a", 512),
        ("NVIDIA GB10", "sm_121a", 1024),
    ],
)
def test_tools_work_with_a_measured_gpu(name, arch, flops):
    found = device.describe(card(name, 84, 24, arch=arch))
    assert tensor_peak(found) == flops
    rates = throughput(found)
    assert rates["wgmma"].per_clock == flops
    assert {"issue", "fma", "mufu", "lsu"} <= rates.keys()
    assert occupancy_of(128, 128, 49152, found).ctas == 4


def test_a_clock_that_the_driver_does_not_say_is_no_crash():
    found = device.describe(card("NVIDIA GB10", 48, 120, arch="sm_121a", clock_mhz=0))
    assert throughput(found)["wgmma"].per_clock == 1024


def test_winners_of_a_measured_gpu_are_saved_and_found(monkeypatch, tmp_path):
    from flashladder.common import catalog

    monkeypatch.setattr(winners, "FOLDER", tmp_path)
    gpu, problem, rung = device.describe(card(*STRANGERS[-1])), Problem(), catalog.find("02")
    path = winners.save(gpu.name, rung.name, winners.name_of(problem), {"block_n": 32}, {"ratio": "1"})
    assert path.name == "of-tomorrow-200sm.yaml"
    assert "of-tomorrow-200sm, which configs/gpus does not describe" in path.read_text()
    assert winners.config(rung, gpu.name, problem).block_n == 32


@pytest.fixture
def driver(monkeypatch):
    """A stand-in for NVIDIA's driver with one H100."""
    numbers = {name: place for place, name in enumerate(device._ATTRIBUTES.values())}
    values = {numbers[name]: getattr(H100, field) for field, name in device._ATTRIBUTES.items()}
    api = SimpleNamespace(
        CUdevice_attribute=SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": n for name, n in numbers.items()}),
        cuDeviceGet=lambda index: (0, index) if index == 0 else (101, None),
        cuDeviceGetAttribute=lambda attribute, handle: (0, values[attribute]),
    )
    properties = SimpleNamespace(name=H100.name, total_memory=H100.memory_bytes)
    monkeypatch.setattr(device, "driver", lambda: api)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device._asked.cache_clear()
    yield api
    device._asked.cache_clear()


def test_the_driver_is_asked(driver):
    assert device.present() == H100


def test_a_driver_that_does_not_answer(driver):
    with pytest.raises(DeviceError, match="the driver does not describe GPU 3: 101"):
        device.present(3)


def test_the_attributes_exist():
    api = pytest.importorskip("cuda.bindings.driver")
    for name in device._ATTRIBUTES.values():
        assert device._attribute(api, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU on this machine")
def test_the_gpu_of_this_machine():
    here = device.present()
    properties = torch.cuda.get_device_properties()
    assert here.name == torch.cuda.get_device_name()
    assert here.num_sms == properties.multi_processor_count
    assert here.shared_per_sm == properties.shared_memory_per_multiprocessor
    found = device.describe(here)
    measured = device._measured(here)
    limits = ("arch", "num_sms", "shared_per_block", "shared_per_sm", "registers_per_sm", "max_threads_per_sm")
    for name in (*limits, "max_ctas_per_sm", "l2_bytes"):
        assert getattr(found, name) == getattr(measured, name), name
    assert measured.bandwidth_gb_s == pytest.approx(found.bandwidth_gb_s, rel=0.05)
    assert tensor_peak(measured) == tensor_peak(found)
