"""The rungs and the references in versions/: what each is, which problems it takes, and how it is found.

A ladder is a folder of rungs, NN_name: versions/backward/ has the one that is called backward. A rung bears its
ladder's name, LADDER/NN_name, and is addressed as LADDER/NN; those of versions/forward/ go by NN_name and NN. Ladders
of one's own lie where common/own.py finds them, and are ladders like any other. References are in versions/references/.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashladder.common import own
from flashladder.common.catalog import loading, schema
from flashladder.common.catalog.configurable import HEAD_DIM_V, Configurable
from flashladder.common.catalog.instruction_sets import INSTRUCTION_SETS
from flashladder.common.catalog.ladder import forget as forget_ladders
from flashladder.common.catalog.ladder import kind_of, ladder_of
from flashladder.common.catalog.naming import address_of, among, in_short, parts, qualified
from flashladder.common.catalog.schema import Drawing, Step, Supports
from flashladder.common.errors import ConfigError, UnsupportedProblemError, unknown
from flashladder.common.own import FIRST
from flashladder.common.paths import REFERENCES, VERSIONS
from flashladder.common.problem.config import GpuDescription, KernelConfig, Value, listing, spell
from flashladder.common.problem.head_dims import HEAD_DIMS
from flashladder.common.problem.kind import FEATURES, Kind

if TYPE_CHECKING:
    from flashladder.common.problem.problem import Problem  # it needs torch, which takes seconds

    Asked = Problem | Kind  # a kind stands for all of its problems

ROW_STRIDE = "row_stride"  # a field that a problem decides, and its kind does not: it is a size
PTXAS_LEVEL = "ptxas_level"  # a field that every rung takes where it is given: it is the compiler's, not the kernel's

_LACKS = {  # by a name in `supports`: what a problem that asks for it is told, to be read after a rung's name
    "causal": "has no causal mask",
    "window": "has no sliding window",
    "softcap": "has no softcap",
    "alibi": "has no ALiBi",
    "sinks": "has no sinks",
    "packed": "takes no packed sequences",
    "dropout": "has no dropout",
    "mods": "takes no mask and no score by an expression",
    "lse": "gives no log-sum-exp",
    "gqa": "needs as many K/V heads as Q heads{0}",
}


@dataclass(frozen=True, kw_only=True)
class Implementation(Configurable):
    """An attention kernel of versions/: what it is, what it takes, and how it can be configured."""

    title: str
    idea: str
    directory: Path
    kernel: Path
    supports: Supports = dataclasses.field(hash=False)
    operation: str  # the name of what it computes
    root: Path  # the folder of all ladders and references

    def config_for(self, problem: "Asked", gpu: GpuDescription | None = None, /, **overrides: Value) -> KernelConfig:
        """Like `config`, but the fields that a problem decides (dtype, head_dim, causal, lse, ...) follow the problem.

        Raises UnsupportedProblemError where no configuration computes the problem.
        """
        if refusal := self._unsupported(problem):
            raise UnsupportedProblemError(f"{self.name} {refusal}; {self.alternative(problem)}")
        decided, columns = self._decided(problem), self.supports.columns(problem.head_dim)
        is_usual = not decided["narrower"] or any(decided.get(name) for name in self.defaults_with)
        usual = {} if is_usual else self.defaults_narrower.get(columns, {})
        if usual.keys() & overrides.keys():  # who changes a part of them changes the rung's own defaults
            usual = {}
        fields = {name: value for name, value in decided.items() if name in self.choices}
        return self.config(gpu, **{**usual, **fields, **overrides})

    def check(self, problem: "Asked", config: KernelConfig) -> None:
        """Raises UnsupportedProblemError unless this implementation, so configured, computes the problem."""
        if refusal := self._refusal(problem, config):
            if self.takes(problem):
                advice = f"configured as {self.config_for(problem)} it takes the problem"
            else:
                advice = self.alternative(problem)
            raise UnsupportedProblemError(f"{self.name} {refusal}; {advice}")

    @property
    def home(self) -> Path | None:
        """The folder of the ladder of one's own that it is in, which keeps results and winners; else None."""
        return None

    def alternative(self, problem: "Asked") -> str:
        """What else takes the problem, in words."""
        able = [other.name for other in references(self.root) if other.takes(problem)]
        return f"of the references {listing(able)} take it" if able else "no reference takes the problem"

    def takes(self, problem: "Asked") -> bool:
        """Whether the default configuration computes the problem."""
        if self._unsupported(problem):
            return False
        try:
            return self._refusal(problem, self.config_for(problem)) is None
        except ConfigError:
            return False

    def _unsupported(self, problem: "Asked") -> str | None:
        """Why no configuration takes the problem, to be read after the name; None when one may."""
        supports, kind = self.supports, kind_of(problem)
        computed = ladder_of(self.operation).operations if supports.packed else ()
        if kind.operation not in (computed := computed or (self.operation,)):
            return f"computes the operation {listing(computed)}, not {kind.operation}"
        if kind.dtype not in supports.dtype:
            return f"takes dtype {listing(supports.dtype)}, not {kind.dtype}"
        if not supports.takes_head_dim(kind.head_dim):
            return f"takes head_dim {supports.head_dims()}, not {kind.head_dim}"
        if refusal := supports.refusal_of_v(kind.head_dim, kind.head_dim_v):
            return refusal
        for name, value in problem.set_options.items():
            usual = None if isinstance(problem, Kind) else problem.asked.option(name).default
            if refusal := supports.refusal(name, value, usual):
                return refusal
        heads = "" if isinstance(problem, Kind) else f", not {problem.num_heads} and {problem.num_heads_k}"
        lacking = (why for name, why in _LACKS.items() if getattr(kind, name) and not getattr(supports, name))
        return next((why.format(heads) for why in lacking), None)

    def _decided(self, problem: "Asked") -> dict[str, Value]:
        kind = kind_of(problem)
        widths = self.supports.columns(kind.head_dim), self.supports.columns_v(kind.head_dim, kind.head_dim_v)
        decided = kind.decided(widths[0])
        if self.apart or self.supports.head_dim_v:
            decided[HEAD_DIM_V] = widths[1]
            decided["narrower"] = widths != (kind.head_dim, kind.head_dim_v)
        if ROW_STRIDE in self.choices and not isinstance(problem, Kind):
            decided[ROW_STRIDE] = problem.num_heads * problem.head_dim
        return decided

    def _refusal(self, problem: "Asked", config: KernelConfig) -> str | None:
        """Why it does not take the problem so configured, to be read after its name; None when it does."""
        if unsupported := self._unsupported(problem):
            return unsupported
        if ROW_STRIDE in config.fields and problem.layout != "bshd":
            return f"needs the layout bshd, whose rows are row_stride={config.row_stride} apart, not {problem.layout}"
        for name, value in self._decided(problem).items():
            if name in config.fields and getattr(config, name) != value:
                configured = f"{name}={spell(getattr(config, name))}"
                return f"is configured for {configured}, but the problem has {name}={spell(value)}"
        for name in () if isinstance(problem, Kind) else ("seqlen_q", "seqlen_k"):
            tile, seqlen = getattr(self.supports, name), getattr(problem, name)
            if tile != "any" and seqlen % getattr(config, tile):
                return f"takes {name} in multiples of {tile}={getattr(config, tile)}, not {seqlen}"
        return None


@dataclass(frozen=True, kw_only=True)
class Version(Implementation):
    """A rung of the ladder: a CUDA kernel that common/compiler compiles."""

    ladder: str  # "backward"
    instruction_set: str
    local_memory: bool = False  # whether its kernels may spill registers
    addresses: tuple[str, ...] = ()  # what its idea removes or makes less of, of limiters.LIMITERS
    parent: str | None = None  # the name of the rung that it was made from, where it says so
    draft: bool = False  # being worked on: its page is not written, and no published table has it
    step: Step | None = dataclasses.field(default=None, hash=False)
    no_exercise: str = ""  # why its idea makes none, where that is said
    milestone: str = ""  # what is new, of a rung that the README's table has
    pictures: Mapping[str, Drawing] = dataclasses.field(default_factory=dict, hash=False)  # by the names of their files

    @property
    def number(self) -> str:
        """Its place in its ladder: "03"."""
        return self.directory.name[:2]

    @property
    def address(self) -> str:
        """What it is called by, short and of this rung alone: NN, LADDER/NN."""
        return address_of(self.name)

    @property
    def file_name(self) -> str:
        """Its name as a part of a file's: LADDER-NN_name."""
        return self.name.replace("/", "-")

    @property
    def home(self) -> Path | None:
        return own.ladders(self.root).get(self.ladder)

    def its_ladder(self) -> "list[Version]":
        """The rungs of its ladder, from the lowest up, itself among them."""
        return versions(self.root, self.ladder)

    def below(self) -> "Version | None":
        """What it is compared with: its parent, or else the next lower rung for the same instruction set.

        ConfigError where it names a parent that is not there.
        """
        if self.parent:
            try:
                return find(self.parent, self.root)
            except ConfigError as error:
                raise ConfigError(f"{self.directory / schema.FILE}: its parent: {error}") from None
        ladder = self.its_ladder()
        lower = [other for other in ladder[: ladder.index(self)] if other.instruction_set == self.instruction_set]
        return lower[-1] if lower else None

    def check_value(self, name: str, value: Value) -> None:
        """As `Implementation.check_value`; PTXAS_LEVEL need not be declared, and is then the last field."""
        if name == PTXAS_LEVEL and name not in self.choices:
            self._checked({name: value})
        else:
            super().check_value(name, value)

    def check_arch(self, arch: str) -> None:
        """Raises ConfigError unless the rung's instructions exist in this arch (sm_80, sm_90a, ...)."""
        try:
            INSTRUCTION_SETS[self.instruction_set].check(self.name, arch)
        except ConfigError as error:
            able = [rung.name for rung in self.its_ladder() if rung.runs_on(arch)]
            advice = f"; the highest rung for {arch} is {able[-1]}" if able else ""
            raise ConfigError(f"{error}{advice}") from None

    def runs_on(self, arch: str) -> bool:
        """Whether the rung's instructions exist in this arch."""
        return INSTRUCTION_SETS[self.instruction_set].exists_on(arch)

    def alternative(self, problem: "Asked") -> str:
        if able := nearest(self, problem):
            return f"the nearest rung that takes the problem is {able.name}"
        return f"no rung takes the problem; {self._instead(problem)}"

    def _instead(self, problem: "Asked") -> str:
        """What would work, in words: fewer columns, or one feature less; else a reference."""
        kind, ladder = kind_of(problem), sorted(self.its_ladder(), key=lambda rung: not rung.draft)
        narrower = (columns for columns in reversed(HEAD_DIMS) if columns < kind.head_dim)
        nearly = {
            f"with head_dim={columns}": replace(kind, head_dim=columns, head_dim_v=columns) for columns in narrower
        }
        for name in (name for name in _LACKS if name in FEATURES and getattr(kind, name)):
            off: dict[str, Any] = {name: False}
            nearly[f"without {name}"] = replace(kind, **off)
        for words, asked in nearly.items():
            if able := next((rung.name for rung in reversed(ladder) if rung.takes(asked)), None):
                return f"{words} {able} would"
        return super().alternative(problem)


@dataclass(frozen=True, kw_only=True)
class Reference(Implementation):
    """An implementation beside the ladder: a Python module that common/measure/references runs."""

    devices: tuple[str, ...]  # cpu, gpu
    requires: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)  # module: line that installs it


def ladders(root: Path = VERSIONS) -> list[str]:
    """The ladders' names, the first one's (FIRST) before the others. ConfigError where one's own cannot be used."""
    others = {path.parents[1].name for path in root.glob("*/[0-9][0-9]_*/version.yaml")}
    return [FIRST, *sorted((others | own.ladders(root).keys()) - {FIRST})]


def folder_of(ladder: str, root: Path = VERSIONS) -> Path:
    """Where the rungs of a ladder are."""
    return own.ladders(root).get(ladder, root / ladder)


def directory_of(name: str, root: Path = VERSIONS) -> Path:
    """Where the rung of a whole name lies, or would."""
    ladder, rung = parts(name)
    return folder_of(ladder, root) / rung


def versions(root: Path = VERSIONS, ladder: str = FIRST) -> list[Version]:
    """All rungs of a ladder, from the lowest up."""
    return [_load(directory, ladder, root) for directory in _rungs(root, ladder)]


def rung_names(root: Path = VERSIONS, ladder: str = FIRST) -> list[str]:
    """The names of all rungs of a ladder, whatever their version.yaml says."""
    return [qualified(ladder, directory.name) for directory in _rungs(root, ladder)]


def finished(root: Path = VERSIONS) -> list[Version]:
    """The rungs of the first ladder that are no drafts: what published tables and pages tell of."""
    return [version for version in versions(root) if not version.draft]


def forget() -> None:
    """What was read of version.yaml is read again, as it may have changed."""
    _load.cache_clear()
    _load_reference.cache_clear()
    forget_ladders()


def find(name: str, root: Path = VERSIONS) -> Version:
    """A rung by its number, with a leading 0 or without, its name (NN_words) or the name's words.

    One of a further ladder has the ladder's name before it, LADDER/NN; without it, its words do where no other
    ladder has them. ConfigError lists those there are.
    """
    ladder, rung = parts(name)
    if rung[:2].isdigit() and (whole := directory_of(name, root) / schema.FILE).is_file():
        return _load(whole.parent, ladder, root)  # its whole name, which calls ask for
    if name in _reference_names(root):
        raise ConfigError(f"{name} is a reference, not a rung of a ladder; rungs have numbers, such as 02")
    known = ladders(root)
    if ladder in known and (directory := among(_rungs(root, ladder), rung)):
        return _load(directory, ladder, root)
    if "/" not in name and not rung.isdigit():
        elsewhere = [(other, found) for other in known[1:] if (found := among(_rungs(root, other), rung))]
        if len(elsewhere) > 1:
            several = listing(qualified(other, found.name) for other, found in elsewhere)
            raise ConfigError(f"{name} is the name of several rungs, {several}: put the ladder's name before it")
        for other, found in elsewhere:
            return _load(found, other, root)
    ladder = ladder if ladder in known else FIRST
    rungs = rung_names(root, ladder)
    others = _others(ladder, root)
    raise unknown("version", name, [*rungs, *others], [*in_short(rungs), *others])


def _others(ladder: str, root: Path) -> list[str]:
    """What can be asked for beside the first ladder's rungs: the references and the other ladders."""
    if ladder != FIRST:
        return []
    return [*_reference_names(root), *(f"those of {other}/" for other in ladders(root) if other != FIRST)]


def select(names: Iterable[str], root: Path = VERSIONS) -> list[Version]:
    """The rungs that a person names, each alone or a whole ladder ("backward"); without a name the first ladder."""
    chosen = [versions(root, name) if name in ladders(root) else [find(name, root)] for name in names]
    return [version for several in chosen for version in several] or versions(root)


def one_operation(operations: Iterable[str]) -> str:
    """The operation of kernels that are to be compared; ConfigError where they are several."""
    several = sorted(set(operations))
    if len(several) > 1:
        raise ConfigError(f"the kernels compute different operations ({listing(several)}): compare those of one")
    return several[0]


def references(root: Path = VERSIONS) -> list[Reference]:
    """The implementations beside the ladders, by name."""
    return [_load_reference(directory, root) for directory in _reference_directories(root)]


def find_implementation(name: str, root: Path = VERSIONS) -> Version | Reference:
    """A rung by any of its names, or a reference by its own."""
    return _load_reference(root / REFERENCES / name, root) if name in _reference_names(root) else find(name, root)


def nearest(version: Version, problem: "Asked") -> Version | None:
    """The rung of the same ladder that takes the problem and is next above `version`, or else next below it.

    One for the same instruction set goes before all others: it runs where `version` does.
    """
    able = [other for other in version.its_ladder() if other != version and other.takes(problem)]
    here = int(version.number)

    def distance(other: Version) -> tuple[bool, bool, int]:
        ahead = int(other.number) - here
        return other.instruction_set != version.instruction_set, ahead < 0, abs(ahead)

    return min(able, key=distance, default=None)


def _rungs(root: Path, ladder: str) -> list[Path]:
    return [path.parent for path in sorted(folder_of(ladder, root).glob("[0-9][0-9]_*/version.yaml"))]


def _reference_directories(root: Path) -> list[Path]:
    return [path.parent for path in sorted((root / REFERENCES).glob("*/version.yaml"))]


def _reference_names(root: Path) -> list[str]:
    return [directory.name for directory in _reference_directories(root)]


@cache
def _load(directory: Path, ladder: str, root: Path) -> Version:
    """Reads a rung's version.yaml; ConfigError names the file and what is wrong with it."""
    with loading.named_in_errors(directory / schema.FILE) as path:
        version = Version(**loading.of_rung(path, qualified(ladder, directory.name)), ladder=ladder, root=root)
        _check(version)
    return version


@cache
def _load_reference(directory: Path, root: Path) -> Reference:
    """Reads a reference's version.yaml; ConfigError names the file and what is wrong with it."""
    with loading.named_in_errors(directory / schema.FILE) as path:
        reference = Reference(**loading.of_reference(path), root=root)
        _check(reference)
    return reference


def _check(implementation: Implementation) -> None:
    if not implementation.kernel.is_file():
        raise ConfigError(f"there is no kernel {implementation.kernel}")
    for tile in (implementation.supports.seqlen_q, implementation.supports.seqlen_k):
        if tile != "any" and tile not in implementation.choices:
            raise ConfigError(f"seqlen_q and seqlen_k are `any` or a field of the rung, not {tile}")
    implementation.check_choices()
