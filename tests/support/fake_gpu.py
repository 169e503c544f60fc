"""A stand-in for a GPU, so that what drives one is tested anywhere: times are made up, and so is what the rungs of the
first ladder give, which rungs/ holds them to. Other kernels run on the emulator."""

import random
from dataclasses import replace
from types import SimpleNamespace

import torch

from flashladder.common import catalog
from flashladder.common.measure import contest, nvml, spot, timing
from flashladder.common.measure.baselines import forward
from flashladder.common.problem import inputs
from flashladder.common.problem.config import load_gpu
from flashladder.common.runtime import target
from flashladder.common.runtime.execute import on_emulator

NAME = "NVIDIA H100 80GB HBM3"
RIGHT = {*catalog.rung_names()}


class FakeTimer:
    """Asks a launch for its time, instead of timing it."""

    def __init__(self, mode):
        self.mode = mode
        self._random = random.Random(0)

    def plan(self, launch, elsewhere=None):
        return timing.SamplePlan(launch, launches=10, lead=1, hold_us=0)

    def sample(self, plan):
        time_us = getattr(plan.launch, "time_us", 100.0)
        return time_us * self._random.gauss(1, 0.001), nvml.GpuState(sm_mhz=1980, power_w=500.0, temperature_c=50)

    def once(self, launch, before, after):
        before()
        launch()
        after()
        return getattr(launch, "time_us", 100.0)

    def warnings(self):
        return ()


def install(monkeypatch):
    """Puts the stand-in in the place of a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: NAME)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    properties = SimpleNamespace(uuid="0123")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    here = target.Target(on_gpu=True, arch="sm_90a", gpu=load_gpu("h100"))
    monkeypatch.setattr(target, "resolve", lambda device, gpu: here)
    monkeypatch.setattr(contest, "make_inputs", lambda task, device: inputs.make_inputs(task, "cpu"))
    monkeypatch.setattr(contest, "on_gpu", _launch)
    monkeypatch.setattr(timing, "_GpuTimer", FakeTimer)
    monkeypatch.setattr(spot, "COUNT", 1)  # what the emulator is asked for takes a while
    monkeypatch.setattr(contest, "hard_problems", lambda task: [])
    fa2 = forward.BASELINES["fa2"]
    monkeypatch.setitem(forward.BASELINES, "fa2", replace(fa2, bind=_attention))


def _launch(artifact, task, tensors):
    def launch():
        if artifact.version not in RIGHT:
            on_emulator(artifact, task, tensors, race=False)
            return
        exact = task.asked.compute(task, tensors.by_name, torch.float64)
        for name, output in tensors.outputs.items():
            output.copy_(exact[name])

    launch.time_us = 80.0
    return launch


def _attention(_, task, tensors):
    def run():
        return forward.Output(task.asked.compute(task, tensors.by_name, torch.float32)["o"].to(tensors.q.dtype))

    run.time_us = 100.0
    return run
