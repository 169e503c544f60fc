"""The backward ladder's rungs, and how a test has one run on the emulator."""

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator

LADDER = "backward"
WIDE = catalog.find(f"{LADDER}/21")
NINETY_SIX = catalog.find(f"{LADDER}/22")  # tiles of 96 keys, of up to 192 columns
RUNGS = [rung for rung in catalog.versions(ladder=LADDER) if rung not in (WIDE, NINETY_SIX)]
ALL_ELSE = {"head_dim": 128, "softcap": 5.0, "alibi": True, "layout": "padded", "options": {"dlse": True}}
HOPPER = [rung for rung in RUNGS if rung.instruction_set == "hopper"]
ANY, WITH_DROPOUT = (catalog.find(f"{LADDER}/{number}") for number in ("11", "12"))
LAST, IN_ORDER = (catalog.find(f"{LADDER}/{number}") for number in ("18", "19"))
WITH_MODS = catalog.find(f"{LADDER}/23")
TILE_LATE = catalog.find(f"{LADDER}/20")  # any attention on Hopper
SINKS_TOO = {"dlse": True, "dsinks": True}
SAME_BITS = {"options": {"deterministic": True}}


def problem(**sizes):
    length = {} if "seqlens_q" in sizes else {"seqlen_q": 128}
    return Problem(**{**length, "head_dim": 64, **sizes}, operation=LADDER)


def emulated(rung, task, tensors=None, expected=None, **overrides):
    """Runs a rung under the race detector and requires right gradients."""
    tensors = tensors or make_inputs(task)
    tensors.poison()
    arch = "sm_90a" if rung.instruction_set == "hopper" else "sm_80"
    report = on_emulator(translate(rung, rung.config_for(task, **overrides), arch), task, tensors)
    verify(expected or expect(task, tensors), tensors.outputs, tensors.buffers).require(rung.name)
    return report
