"""The rungs of attention and what each takes, as its version.yaml says; problems and configurations for any of them.

A rung that is added, or that takes more than before, comes into the tests by itself.
"""

import itertools
import math
import random

import pytest
import torch

from flashladder.common import catalog
from flashladder.common.compiler import build_one, translate
from flashladder.common.errors import ConfigError
from flashladder.common.own import FIRST
from flashladder.common.problem.check import expect, verify
from flashladder.common.problem.head_dims import HEAD_DIM_STEP
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.operations.forward import LAYOUTS, PACKED_INPUTS, V_IS_K
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime import target
from flashladder.common.runtime.execute import EMULATED_SMS, on_emulator

RUNGS = [
    rung
    for ladder in catalog.ladders()
    for rung in catalog.versions(ladder=ladder)
    if rung.operation == FIRST and not rung.home
]
OF_MODS = [rung for rung in RUNGS if rung.supports.mods]  # without an expression each has its parent's machine code
_WITHOUT_MODS = [rung for rung in RUNGS if rung not in OF_MODS]
GENERAL = [rung for rung in _WITHOUT_MODS if rung.takes(Problem(seqlen_q=3, seqlen_k=2, head_dim=64, causal=True))]
LAUNCHED = [
    rung for rung in GENERAL if rung in (catalog.find(launch.rung) for launch in catalog.ladder_of(FIRST).launches)
]  # by `attention`
OTHERS = [rung for rung in GENERAL if rung not in LAUNCHED]
WIDE = [
    rung for rung in _WITHOUT_MODS if rung not in GENERAL and rung.takes(Problem(seqlen_q=3, head_dim=512))
]  # launched too
ANY_LENGTH = [*GENERAL, *WIDE]  # and any option
# Fields of a configuration that a problem decides.
DECIDED = (
    *("head_dim", "head_dim_v", "dtype", "causal", "lse", "window", "softcap", "alibi", "sinks", "dropout"),
    *("packed", "narrower", "mods"),
)
BOUNDARIES = (0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 150)


def id_of(rung):
    """In a test's name."""
    return rung.address


def mostly_slow(rungs):
    """Rungs as a test's parameters: those that calls launch and every third of a ladder are not slow."""
    launched = [launch.rung for ladder in catalog.ladders() for launch in catalog.ladder_of(ladder).launches]
    quick = [*map(catalog.find, launched), *(rung for rung in rungs if int(rung.number) % 3 == 0)]
    marks = {rung: () if rung in quick else pytest.mark.slow for rung in rungs}
    return [pytest.param(rung, id=rung.name, marks=mark) for rung, mark in marks.items()]


def default_kind(rung):
    """What each rung is tested with first."""
    return {"head_dim": min(rung.supports.head_dim), "dtype": "bf16", "causal": rung.supports.causal}


def decided(config):
    """What of a problem a configuration says; a head_dim that is padded to the kernel's, where that is so."""
    found = {name: value for name, value in config.as_dict().items() if name in DECIDED}
    return found | ({"head_dim": config.head_dim - HEAD_DIM_STEP} if found.pop("narrower", False) else {})


def built(rung, problem, make=translate, **values):
    """What the emulator runs, for what it stands for; without `values` as `attention` configures it there. So do most
    tests, and the cache has it once. With `build_one` ptxas has its say too: on spills, and on wgmma one by one."""
    card = target.resolve("emulator", None).card
    chosen, config = catalog.choice(problem, card) if rung in (*LAUNCHED, *OF_MODS) and not values else (None, None)
    if chosen != rung:
        config = rung.config_for(problem, **values)
        rung.check(problem, config)
    return make(rung, config, card.arch)


def emulated(rung, problem, tensors=None, num_sms=EMULATED_SMS, make=translate, **values):
    """Requires a right output without a race; returns the tensors and the emulator's report."""
    tensors = tensors or make_inputs(problem)
    tensors.poison()
    module = built(rung, problem, make, **values)
    report = on_emulator(module, problem, tensors, num_sms=num_sms)
    verify(expect(problem, tensors), tensors.outputs, tensors.buffers).require(f"{problem.name} with {module.config}")
    return tensors, report


# -- configurations


def draw_config(rng, rung):
    """A valid configuration of a rung."""
    while True:
        choices = rung.choices.items()
        values = {name: rng.choice(choice.values) for name, choice in choices if choice.values}
        try:
            return rung.config(**values)
        except ConfigError:
            continue


def fullest(rung, operation="packed", **options):
    """For calls that ask for all options at once, of every width, with dropout or not: kernels are longest there."""
    lengths = {"operation": operation, "seqlens_q": (5, 300), "seqlens_k": (300, 5)}
    scores = {"causal": True, "window_left": 90, "softcap": 20.0, "alibi": True, "sinks": operation == "packed"}
    for head_dim, dropout_p in itertools.product(rung.supports.head_dim, (0.0, 0.1)):
        problem = Problem(**lengths, **scores, head_dim=head_dim, dropout_p=dropout_p, options=options)
        if rung.takes(problem):
            yield rung.config_for(problem)


def covering(rung, names=None, strength=1, beside=()):
    """Few configurations that have every value of these fields, or every pair of values, that the rung's rules allow.

    The other fields are as they come. What those `beside` them have is not asked again.
    """
    rng = random.Random(rung.name)
    beside, parts = list(beside), {}
    for config in (*beside, *(draw_config(rng, rung) for _ in range(15 * 6**strength))):
        values = [each for each in config.as_dict().items() if names is None or each[0] in names]
        parts[config] = set(itertools.combinations(values, strength))
    left, found = set().union(*parts.values()).difference(*(parts[config] for config in beside)), []
    while left:
        found.append(max(parts, key=lambda config: len(parts[config] & left)))
        left -= parts[found[-1]]
    return found


# -- problems


def draw(rng, longest, *, packed=False, window=False, softcap=False, dropout=False, **kind):
    """Any lengths, short ones often; any heads, layout, scale, and what the kind has of bounds."""
    heads_k = rng.choice((1, 1, 2, 3))
    lengths = _packed_lengths(rng, longest) if packed else _lengths(rng, longest)
    rows, keys = (sum(lengths[name]) for name in lengths) if packed else lengths.values()
    same_width = kind.get("head_dim_v") in (None, kind.get("head_dim"))
    loads_once = kind.get("head_dim", 0) > 256  # what of K and V is one tensor
    layouts = [name for name in LAYOUTS if name != V_IS_K or loads_once]
    return Problem(
        **lengths,
        **{} if packed else {"batch": rng.choice((1, 1, 2))},
        num_heads=heads_k * rng.choice((1, 1, 2, 4)),
        num_heads_k=heads_k,
        **{"operation": "packed" if packed else "forward", "lse": rng.random() < 0.8} | kind,
        **_window(rng, kind["causal"]) if window else {},
        softcap=rng.choice((1.0, 20.0, 50.0)) if softcap else 0.0,
        dropout_p=rng.choice((0.1, 0.5)) if dropout else 0.0,
        softmax_scale=rng.choice((None, math.exp(rng.uniform(-6, 0)))),
        layout=rng.choice([name for name in layouts if name != PACKED_INPUTS or (rows == keys and same_width)]),
        seed=rng.randrange(2**31),
    )


def masked(**options):
    return Problem(**{"head_dim": 64, "causal": True} | options)


def packed(seqlens_q, seqlens_k, **options):
    return masked(operation="packed", seqlens_q=seqlens_q, seqlens_k=seqlens_k, **options)


def _lengths(rng, longest):
    lengths = {name: rng.randint(1, rng.choice((4, 40, longest))) for name in ("seqlen_q", "seqlen_k")}
    return dict.fromkeys(lengths, lengths["seqlen_q"]) if rng.random() < 0.25 else lengths


def _packed_lengths(rng, longest):
    """Often none."""
    count = rng.randint(1, 7)
    q, k = (
        [rng.choice((0, rng.randint(0, 4), rng.randint(0, 70), rng.randint(0, longest))) for _ in range(count)]
        for _ in "qk"
    )
    for each in (q, k):
        each[rng.randrange(count)] += 1  # not all may be empty
    return {"seqlens_q": tuple(q), "seqlens_k": tuple(q if rng.random() < 0.4 else k)}


def _window(rng, causal):
    """With an end on one side or on both."""
    left, right = rng.choice((*BOUNDARIES, None)), rng.choice(BOUNDARIES)
    if causal:
        return {"window_left": 7 if left is None else left}
    return {"window_left": left, "window_right": None if left is not None and rng.random() < 0.3 else right}


def problem_for(rng, rung, config, longest):
    """A problem that the rung takes so configured."""
    if rung in (*ANY_LENGTH, *OF_MODS):
        return draw(rng, longest, **{"causal": False} | decided(config))
    tiles = {name: getattr(rung.supports, name) for name in ("seqlen_q", "seqlen_k")}
    lengths = {
        name: rng.randint(1, longest) if tile == "any" else getattr(config, tile) * rng.randint(1, 3)
        for name, tile in tiles.items()
    }
    heads = {"num_heads": 2 * (heads_k := rng.randint(1, 2)), "num_heads_k": heads_k} if rung.supports.gqa else {}
    layout = "bshd" if "row_stride" in rung.choices else rng.choice(("bshd", "bhsd", "padded"))
    sizes = {"batch": rng.randint(1, 2), "num_heads": rng.randint(1, 3)} | lengths | heads
    return Problem(**sizes, **decided(config), layout=layout, seed=rng.randrange(2**31))


def climbing(rung, height, every=1, **options):
    """Scores of each block of keys lie far above those of the blocks before it, which stand behind it.

    Of every so many rows all, of the others some.
    """
    problem = masked(seqlen_q=128, seqlen_k=640, **options)
    tensors = make_inputs(problem)
    tensors.q[:, ::every].abs_()
    tensors.k.abs_()
    tensors.k.copy_(tensors.k * torch.linspace(height, 0.1, 640).reshape(1, 640, 1, 1))
    emulated(rung, problem, tensors)


def one_after_another(config, **kind):
    """Each warpgroup of a tile sees another number of blocks: some are passed while the tile before ends."""
    bounds = {"window_left": 90, "window_right": None if kind["causal"] else 40} if kind.pop("window", False) else {}
    bounds |= {"softcap": 20.0} if kind.pop("softcap", False) else {}
    bounds |= {"dropout_p": 0.3} if kind.pop("dropout", False) else {}
    m = config.block_m
    if kind.pop("packed", False):
        lengths = {"seqlens_q": (m + 1, 0, m, 5, 2 * m), "seqlens_k": (70, 9, m + 200, 0, 2 * m)}
        return Problem(operation="packed", **lengths, **kind, **bounds)
    return Problem(num_heads=3, seqlen_q=m, **kind, **bounds)


def tile_of(config):
    """What of a configuration is the rung's own choice."""
    return {name: value for name, value in config.as_dict().items() if name not in {*DECIDED, "row_stride"}}


def emulated_as_configured(rung, config, problems=1, longest=200):
    """Problems that the configuration is for: so many at random, and of a general rung tiles on one SM."""
    rng = random.Random(f"{rung.name} {config}")
    tile = {"make": build_one, **tile_of(config)}
    for _ in range(problems):
        emulated(rung, problem_for(rng, rung, config, longest), num_sms=rng.choice((1, 2, 132)), **tile)
    if rung in ANY_LENGTH:
        emulated(rung, one_after_another(config, **{"causal": False} | decided(config)), num_sms=1, **tile)
