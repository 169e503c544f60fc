"""Each synchronisation of every rung is taken out in turn, and each of its counts and parities changed: the emulator
reports it, an output changes, or redundant.yaml says why nothing is lost. What it does not find with warps that run
until they must wait, it is asked again with some that lag. Of rungs that synchronise alike one is asked for everything,
the others for what they have beside it, and for what is redundant. Each run asks an eighth of them, which
follows from the rung's files."""

import itertools
from collections import Counter
from copy import copy
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

from flashladder.common import catalog, emulator
from flashladder.common.compiler import translate
from flashladder.common.compiler.sources import Sources
from flashladder.common.emulator import compile_ptx
from flashladder.common.emulator.mutate import mutated, mutations
from flashladder.common.errors import EmulatorError
from flashladder.common.problem.inputs import make_inputs
from flashladder.common.problem.problem import Problem
from flashladder.common.runtime.execute import on_emulator
from flashladder.tests.emulator.forks import tried
from flashladder.tests.support.turns import SOURCES, is_in_turn

pytestmark = pytest.mark.slow

FILES = sorted(Path(__file__).parent.glob("redundant*.yaml"))
LISTED = [entry for file in FILES for entry in yaml.safe_load(file.read_text())]
REDUNDANT = [entry for entry in LISTED if "/" not in entry["rung"]]  # other ladders have tests of their own

HALVING = ("41", "42", "43", "44", "45", "46", "47", "48", "49")  # of a tile's first block upper rows take half
# Their CTAs draw tiles from a queue of two slots, which has to come round.
TILES_OF_A_HEAD = (
    dict.fromkeys(("34", "35", "36", "37", "38"), 2) | {"39": 4, "40": 4} | dict.fromkeys(HALVING, 5) | {"50": 3}
)
# A warpgroup past the end, or above the first row, only gives back.
WITHOUT_ROWS = dict.fromkeys(("35", "36", "37", "38", "39", "40", *HALVING), 64)
# When they draw a tile depends on how many blocks the one before has: under a causal mask these have 0, 1, 3 and 4.
# Those from rung 41 on have 0 to 4 blocks of 128 keys, and one of two warpgroups half a block less.
MASKED_KEYS = {"39": 256, "40": 256} | dict.fromkeys(HALVING, 448) | {"50": 256}
# These have no synchronisation that a higher rung has not, instruction by instruction, and are not asked again.
AS_IN = {"31": "33", "32": "33", "35": "37", "39": "40", "41": "45", "42": "45", "44": "45"}
# These are asked for what they have beside others; of those each is asked for what it has beside yet others, and in the
# end rung 43 for everything. So each synchronisation is taken out of one rung at least that has its line of source.
BESIDE = dict.fromkeys(("29", "30", "33", "34", "36", "37"), ("38",)) | {
    "38": ("38", "43"),  # whose second entry comes beside its first
    "40": ("43", "45"),
    "45": ("43",),
    **dict.fromkeys(("46", "47", "48"), ("48 with dropout",)),
    "48 with dropout": ("43",),
    "49": ("48", "48 with dropout"),
    "50": ("48", "48 with dropout"),
}
CARRIERS = ("43", "48", "48 with dropout")  # of rung 49
WEAKER = ("one group less",)  # than with the instruction, but more than without it


def is_hint(name):
    """Whether a change only leaves a warp with more or fewer registers: setmaxnreg "provides a hint to the system" (PTX
    ISA 9.7.19.5), and what fewer are too few for is the compiler's to say. That the pool suffices is checked."""
    return name[0].startswith("setmaxnreg") and (".inc" in name[0] or name[3] != "removed")


def kind_of(name):
    """Of a mutation: the same in every rung that has the instruction."""
    return *name[:2], name[3]


def once_a_line(asked, blocks):
    """Without the narrower scopes of accesses that a line makes again in its block, as of an unrolled loop: what orders
    one of them orders all."""
    block_of = {i.index: block.index for block in blocks for i in block.instructions}
    first = {}
    for name, mutation in asked.items():
        i = mutation.instruction
        place = (block_of[i.index], i.opcode, i.source) if mutation.change == "of its CTA" else name
        first.setdefault(place, name)
    return {name: asked[name] for name in first.values()}


def called(entry):
    """An entry of redundant.yaml, as BESIDE names it."""
    return f"{entry['rung']} with dropout" if entry["config"].get("dropout") else entry["rung"]


def redundant_in(entry):
    """The names of the mutations of an entry of redundant.yaml."""
    return [(*name[:3], name[3] if len(name) > 3 else "removed") for name in entry["instructions"]]


def cases():
    """Every finished rung that can hold Q in registers, where nothing is redundant, and what redundant.yaml names; and
    the entries beside which it is asked."""
    for version in catalog.finished():
        if version.number in AS_IN:
            continue
        if any(entry["rung"] == version.number and "q_fragments" not in entry["config"] for entry in REDUNDANT):
            continue  # Q is never held
        held = {"q_fragments": 0} if "q_fragments" in version.choices else {}
        config = {"block_m": min(version.choices["block_m"].values), **held}
        if version.instruction_set == "hopper":
            config["block_n"] = min(version.choices["block_n"].values)
        yield pytest.param(version, config, [], [], id=version.name)
    first = {called(entry): entry for entry in reversed(REDUNDANT)}
    for entry in REDUNDANT:
        version = catalog.find(entry["rung"])
        beside = [other for of in BESIDE.get(called(entry), ()) if (other := first[of]) is not entry]
        kind = "dropout" if entry["config"].get("dropout") else "redundant"
        marks = [pytest.mark.every_time] if called(entry) in CARRIERS else []  # what calls launch is asked beside them
        yield pytest.param(
            version, entry["config"], redundant_in(entry), beside, id=f"{version.name}-{kind}", marks=marks
        )


class Rung:
    """A rung's program and a problem that takes it every way through its softmax.

    Each head has a jump of its own: of all warps, of one warp, and of one in the last block, which leave the range, so
    that their rows begin anew; and one that only moves an anchor.
    """

    JUMPS = (
        {"block": 2, "warps": (0, 1, 2, 3), "nats": 100},
        {"block": 1, "warps": (0,), "nats": 100},
        {"block": 0, "warps": (1,), "nats": 100},
        {"block": 1, "warps": (2,), "nats": 20},
    )

    def __init__(self, version, overrides):
        is_hopper = version.instruction_set == "hopper"
        self.arch = "sm_90a" if is_hopper else "sm_80"
        default = version.config(**overrides)
        self.block_n = max(default.block_n, 64)
        # nvcc unrolls producers' loops four times: twice round, some left over
        keys = MASKED_KEYS.get(version.number, (11 if is_hopper else 4) * self.block_n)
        self.problem = Problem(
            num_heads=len(self.JUMPS),
            seqlen_q=max(default.block_m, 64) * TILES_OF_A_HEAD.get(version.number, 1)
            - WITHOUT_ROWS.get(version.number, 0),
            seqlen_k=keys,
            head_dim=default.head_dim,
            head_dim_v=default.as_dict().get("head_dim_v"),
            dtype=default.dtype,
            causal=version.number in MASKED_KEYS,
            dropout_p=0.3 if overrides.get("dropout") else 0.0,
        )
        last_tile = (self.problem.seqlen_q - 1) // default.block_m * default.block_m
        # Under a mask the last tile sees all blocks. From rung 41 on its rows begin with half a block, and those before
        # them with a whole one.
        first = last_tile if self.problem.causal else 0
        self.jumping_from = [first, first - 64] if version.number in HALVING else [first]
        self.artifact = translate(version, version.config_for(self.problem, **overrides), self.arch)
        self.warp_rows = default.block_m * 32 // self.artifact.launch.num_threads
        self.program = compile_ptx(self.artifact.ptx.read_text(), self.artifact.entry)
        self.sources = [
            version.kernel,
            *(header for header in Sources().headers(version.kernel) if header.parent.name != "ptx"),
        ]

    def inputs(self):
        """Element 0 of Q tells whether a row jumps, and of K by how much."""
        tensors = make_inputs(self.problem)
        tensors.q[..., 0] = tensors.k[..., 0] = 0
        for head, jump in enumerate(self.JUMPS[: self.problem.num_heads]):
            first_key = jump["block"] * self.block_n
            tensors.k[:, first_key : first_key + self.block_n, head, 0] = jump["nats"] / self.problem.softmax_scale
            for first, warp in itertools.product(self.jumping_from, jump["warps"]):
                first_row = first + warp * self.warp_rows
                tensors.q[:, first_row : first_row + self.warp_rows, head, 0] = 1
        return tensors

    def run(self, program, lagging=(), entering=None):
        """The emulator's report, and O and the log-sum-exp. Raises EmulatorError if it finds something wrong."""
        tensors, run = self.inputs(), partial(emulator.run, entering=entering)
        with patch.object(emulator, "compile_ptx", return_value=program), patch.object(emulator, "run", run):
            report = on_emulator(self.artifact, self.problem, tensors, lagging=lagging)
        return report, [view.contiguous().view(torch.uint8).numpy().tobytes() for view in (tensors.o, tensors.lse)]

    def smaller(self):
        """The same program, and a problem that takes it a shorter way, which finds most: one head, and where no mask
        decides how many there are, fewer blocks. Of rungs before Hopper none: whole heads run side by side."""
        if self.arch != "sm_90a":
            return None
        few = {} if self.problem.causal else {"seqlen_k": min(self.problem.seqlen_k, 5 * self.block_n)}
        return self.with_problem(replace(self.problem, num_heads=1, num_heads_k=1, **few))

    def with_problem(self, problem):
        """The same program, with another problem."""
        other = copy(self)
        other.problem = problem
        return other

    def schedules(self):
        """Which warps lag: none, then each warp in turn, of Hopper each warpgroup."""
        yield ()
        num_warps, together = self.artifact.launch.num_threads // 32, 4 if self.arch == "sm_90a" else 1
        yield from (range(first, first + together) for first in range(0, num_warps, together))

    def missed(self, mutations, lagging, outputs):
        """The names of those of the mutations, by name, with which the program is not reported by a schedule and gives
        the same outputs. Without any it must do so."""
        unchanged, missed = tried(
            lambda program, entering: self.run(program, lagging, entering)[1], self.program, mutations, outputs
        )
        assert unchanged == outputs
        return missed

    def misses(self, mutations, lagging, outputs):
        """Whether a schedule does not report the program with all of these mutations, and it gives the same outputs."""
        try:
            return self.run(reduce(mutated, mutations, self.program), lagging)[1] == outputs
        except EmulatorError:
            return False

    def missed_removals(self, removals, outputs):
        """The names of those of some removals, (name, mutation), that the first schedule misses, each alone. What it
        misses when all are gone it misses when fewer are: nothing that orders accesses is lost then."""
        if not removals or self.misses([mutation for _, mutation in removals], (), outputs):
            return [name for name, _ in removals]
        if len(removals) == 1:
            return []
        middle = len(removals) // 2
        return [each for half in (removals[:middle], removals[middle:]) for each in self.missed_removals(half, outputs)]

    def all_missed(self, redundant, reported=None):
        """The names of the mutations that no schedule finds. What is `redundant` the first one alone is asked; of the
        others those are not asked that have been `reported`, by kind, as often as there are any, and those no more that
        the smaller problem finds."""
        report, outputs = self.run(self.program)
        found = dict(self.mutations())
        assert len(found) == len(list(mutations(self.program))) >= 1
        assert not [name for name, mutation in found.items() if mutation.instruction.index not in report.reached]
        assert found.keys() >= set(redundant)
        removals = [(name, found[name]) for name in redundant if name[3] == "removed"]
        missed = self.missed_removals(removals, outputs)
        weaker = {(*name[:3], change) for name, _ in removals for change in WEAKER}  # found or not
        own, reported = self.counted(), reported or Counter()
        known = {name for name in found.keys() - set(redundant) if own[kind_of(name)] <= reported[kind_of(name)]}
        answered = known | weaker.union(name for name, _ in removals)
        digest = SOURCES.digest(self.sources[0], paths=False)
        asked = {
            name: each
            for name, each in once_a_line(found, self.program.blocks).items()
            if not is_hint(name) and name not in answered and (name in redundant or is_in_turn(str(name), digest))
        }
        few, of_few = self.smaller(), None
        if few:
            of_few = few.run(self.program)[1]
            asked = {name: asked[name] for name in few.missed(asked, (), of_few)}
        for lagging in self.schedules():
            if few and not asked:  # it does not mind who lags
                few.missed(asked, lagging, of_few)
                continue
            left = self.missed(asked, lagging, outputs)
            missed += [name for name in left if name in redundant]
            asked = {name: asked[name] for name in left if name not in redundant}
        return sorted([*missed, *asked])

    def forks_answer_as_runs_do(self, every=1):
        """Requires that forks miss what runs with a mutation miss; of every so many mutations one is asked."""
        _, outputs = self.run(self.program)
        asked = dict(list(self.mutations())[::every])
        alone = {name for name, mutation in asked.items() if self.misses([mutation], (), outputs)}
        assert set(self.missed(asked, (), outputs)) == alone
        assert 0 < len(alone) < len(asked)

    def counted(self):
        """How often each line of source is one of these opcodes, changed in this way."""
        return Counter(kind_of(name) for name, _ in self.mutations())

    def mutations(self):
        """(name, mutation) of all that can be done; the name: opcode, line of source, which of its kind, the change."""
        lines = {source.name: source.read_text().splitlines() for source in self.sources}
        seen, before = Counter(), None
        for mutation in mutations(self.program):
            instruction = mutation.instruction
            chain = ((Path(file).name, line) for file, line in instruction.source)
            text = next(lines[file][line - 1] for file, line in chain if file in lines)
            kind = instruction.opcode, text.split("//")[0].strip()
            seen[kind] += instruction is not before
            before = instruction
            yield (*kind, seen[kind], mutation.change), mutation


@pytest.mark.parametrize(("lower", "higher"), AS_IN.items())
def test_what_is_not_asked_has_no_synchronisation_of_its_own(lower, higher):
    config = next(entry["config"] for entry in REDUNDANT if entry["rung"] == higher)
    first, second = (Rung(catalog.find(number), config).counted() for number in (lower, higher))
    assert first <= second
    assert (second - first).total() <= 1


@pytest.mark.parametrize(("number", "every"), [("04", 1), ("27", 2)])
def test_a_fork_answers_as_a_run_with_the_mutation_does(number, every):
    cases_of = (param.values for param in cases() if param.values[0].number == number)
    version, overrides, *_ = next(case for case in cases_of if case[2])  # some are missed
    Rung(version, overrides).forks_answer_as_runs_do(every)


@pytest.mark.parametrize(("version", "overrides", "redundant", "beside"), list(cases()))
def test_the_loss_of_any_synchronisation_is_reported(version, overrides, redundant, beside):
    reported = Counter()
    for entry in beside:
        other = Rung(catalog.find(entry["rung"]), entry["config"]).counted()
        reported |= other - Counter(map(kind_of, redundant_in(entry)))
    assert Rung(version, overrides).all_missed(redundant, reported) == sorted(redundant)
