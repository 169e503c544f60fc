"""The configurations that measured best. The tuner writes them, one file per GPU: configs/tuned/<gpu>.yaml.

Those of a ladder of one's own, or that a program adopted, are in its folder, tuned/<gpu>.yaml. On a GPU without winners
those of the nearest one count. A winner belongs to a
rung and a kind of problem (common/problem/kind.py): of one class of lengths, unless it won among all. The figures that
it won with stand beside it.
"""

from __future__ import annotations

import fcntl
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml

from flashladder.common import own, yaml_files
from flashladder.common.catalog.catalogue import find
from flashladder.common.catalog.ladder import kind_of, ladder_of
from flashladder.common.errors import ConfigError, ResultsError, UnsupportedProblemError
from flashladder.common.paths import CONFIGS, adopted_dir
from flashladder.common.problem.config import KernelConfig, Value, gpu_names, listing, load_gpu, parse_values, spelled
from flashladder.common.problem.kind import FEATURES, LENGTHS

if TYPE_CHECKING:
    from flashladder.common.catalog.catalogue import Version
    from flashladder.common.problem.config import GpuDescription
    from flashladder.common.problem.kind import Kind
    from flashladder.common.problem.problem import Problem

    Asked = Problem | Kind

FOLDER = CONFIGS / "tuned"
_LENGTH = ",length="  # before a kind's class of lengths


@dataclass(frozen=True)
class Winner:
    """The best configuration of a rung on a GPU, for the problems of one kind."""

    gpu: str
    version: str  # the rung's name
    kind: str  # as one of `names_for` spells it
    values: dict[str, Value]
    evidence: dict[str, Any]


def name_of(asked: Asked) -> str:
    """The kind of a problem, as winners are named: 'dtype=bf16,head_dim=128,causal=false,length=long'."""
    kind = kind_of(asked)
    return f"{_any_length(kind)}{_LENGTH}{kind.length}"


def names_for(asked: Asked) -> list[str]:
    """Whose winners will do for a problem, the best first: those of its class, of any length, of the other class.

    Then those of other sizes, and of problems without its features. None of another head_dim: rows that begin amid 128
    bytes of memory want other tiles.
    """
    kind = kind_of(asked)
    without: dict[str, Any] = dict.fromkeys(FEATURES, False)
    plain = replace(kind, **without)
    lengths = [f"{_LENGTH}{kind.length}", "", *(f"{_LENGTH}{length}" for length in LENGTHS)]
    likes = [_any_length(kind), kind.any_size, _any_length(plain), plain.any_size]
    return list(dict.fromkeys(f"{like}{length}" for like in likes for length in lengths))


def of_each_length(problem: Problem) -> list[Problem]:
    """The problem, and one like it of the other class of lengths; so are the kernels for both found beforehand."""
    ladder = ladder_of(problem.operation)
    others = {length: keys for length, keys in ladder.lengths.items() if length != ladder.length_of(problem.seqlen_k)}
    return [problem, *(replace(problem, seqlen_k=keys, seqlens_q=(), seqlens_k=()) for keys in others.values())]


def _any_length(kind: Kind) -> str:
    return ",".join(filter(None, (kind.any_size, spelled(dict(kind.classes)))))


def config(version: Version, gpu: str, problem: Asked, adopted: Path | None = None) -> KernelConfig | None:
    """The rung's winner on the GPU, as far as there is one, the rung still has it, and it takes the problem.

    Those that a program adopted go first, whose folder is the program's own by default: see tuner/adopt.
    """
    homes = _homes(version.home, adopted)
    return next(filter(None, (choose(version, problem, of_gpu(gpu, home)) for home in homes)), None)


def fastest(rungs: Sequence[Version], gpu: str, problem: Asked, adopted: Path | None = None) -> Version | None:
    """Of a ladder's rungs the one whose winner has the highest ratio, the first of equals; None where none has one.

    Only winners of one kind are compared, the first kind that any of them has, and by the problems that all of them
    were found with, if there are any. What was adopted goes first here too, so that a problem stays with the rung that
    was tuned for it.
    """
    for home in _homes(None, adopted):
        among = {(winner.kind, winner.version): winner for winner in of_gpu(gpu, home)}
        for kind in names_for(problem):
            of_kind = [(rung, among[kind, rung.name]) for rung in rungs if (kind, rung.name) in among]
            if able := [(rung, winner) for rung, winner in of_kind if _as_won(rung, problem, winner)]:
                common = set.intersection(*(set(_problems(winner)) for _, winner in able))
                return max(able, key=lambda each: _ratio(each[1], home, common))[0]
    return None


def source(gpu: GpuDescription, home: Path | None = None, adopted: Path | None = None) -> str:
    """The GPU whose winners count on this one: itself, or where it has none the nearest that has some.

    Nearest is the described one of the same arch whose SMs and bandwidth differ least, by their ratios.
    """
    tuned = {path.stem for each in _homes(home, adopted) for path in path_of("", each).parent.glob("*.yaml")}
    others = [load_gpu(name) for name in sorted(tuned & set(gpu_names())) if gpu.name not in tuned]
    alike = [other for other in others if other.arch == gpu.arch]
    return min(alike, key=lambda other: _distance(gpu, other), default=gpu).name


def _distance(gpu: GpuDescription, other: GpuDescription) -> float:
    sizes = ((getattr(each, name) for each in (gpu, other)) for name in ("num_sms", "bandwidth_gb_s"))
    return sum(abs(math.log(ours / theirs)) for ours, theirs in sizes if ours)  # drivers may tell no bandwidth


def _homes(home: Path | None, adopted: Path | None) -> list[Path | None]:
    """The folders whose winners count, the first one first: what a program adopted, then the ladder's."""
    return [first, home] if (first := adopted or adopted_dir()) else [home]


def _problems(winner: Winner) -> list[str]:
    """The problems that it was found with, by their names, as far as its evidence says."""
    names = winner.evidence.get("problems")
    return [str(name) for name in names] if isinstance(names, list) else []


def _ratio(winner: Winner, home: Path | None, problems: Collection[str]) -> float:
    """How fast it won: over some of its problems, or as '1.0123 [1.0101, 1.0145]' begins. 0 where it does not say.

    ConfigError for what is no ratio.
    """
    evidence = winner.evidence
    if (text := evidence.get("ratio")) is None:
        return 0.0
    with suppress(ValueError, IndexError, TypeError, KeyError, ZeroDivisionError):
        value = float(str(text).split()[0])
        if problems:
            of_each = zip(_problems(winner), evidence["baseline_us"], evidence["times_us"], strict=True)
            value = math.exp(fmean(math.log(theirs / ours) for name, theirs, ours in of_each if name in problems))
        if 0 < value < math.inf:
            return value
    path = path_of(winner.gpu, home)
    raise ConfigError(f"{path}: the winner of {winner.version} for {winner.kind} is damaged: its ratio is {text!r}")


def choose(version: Version, problem: Asked, among: Iterable[Winner]) -> KernelConfig | None:
    """Of a rung's winners, one of each kind, the best that takes the problem, and that the rung still has.

    None where there is none.
    """
    of_rung = {winner.kind: winner for winner in among if winner.version == version.name}
    for kind in names_for(problem):
        if (winner := of_rung.get(kind)) and (found := _as_won(version, problem, winner)):
            return found
    return None


def _as_won(version: Version, problem: Asked, winner: Winner) -> KernelConfig | None:
    """A winner's configuration for the problem; None where the rung has it no more, or it does not take that."""
    with suppress(ConfigError, UnsupportedProblemError):
        found = version.config_for(problem, **winner.values)
        version.check(problem, found)
        return found
    return None


def standing(winner: Winner) -> KernelConfig:
    """Its configuration, of its kind: what fits depends on the head_dim. ConfigError where its rung has it no more."""
    version = find(winner.version)
    pairs = winner.kind.partition(_LENGTH)[0].split(",")
    decided = parse_values(",".join(pair for pair in pairs if pair.partition("=")[0] in version.choices))
    if isinstance(head_dim := decided.get("head_dim"), int):
        decided["head_dim"] = version.supports.columns(head_dim)
    return version.config(**decided | winner.values)


def path_of(gpu: str, home: Path | None = None) -> Path:
    """The file of a GPU's winners; `home` is the folder of a ladder of one's own."""
    return (home / "tuned" if home else FOLDER) / f"{gpu}.yaml"


def of_gpu(gpu: str, home: Path | None = None) -> list[Winner]:
    """All winners on a GPU; ConfigError where its file is damaged."""
    path = path_of(gpu, home)
    return list(_winners(path, _text(path)))


def every() -> list[Winner]:
    """The winners on all GPUs, those of one's own ladders too."""
    homes = (None, *own.ladders().values())
    files = ((path, home) for home in homes for path in sorted(path_of("", home).parent.glob("*.yaml")))
    return [winner for path, home in files for winner in of_gpu(path.stem, home)]


def save(
    gpu: str,
    version: str,
    kind: str,
    values: Mapping[str, Value],
    evidence: Mapping[str, Any],
    home: Path | None = None,
) -> Path:
    """Write a winner in the place of an earlier one of its kind. ResultsError where that cannot be done."""
    path = path_of(gpu, home)
    try:
        path.parent.mkdir(exist_ok=True)
        with path.with_name(f".{gpu}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = _parsed(path, _text(path))
            entry = {"config": KernelConfig.of(**values).name, **evidence}
            content[version] = dict(sorted({**content.get(version, {}), kind: entry}.items()))
            header = (
                f"# The configurations that measured best on {_title(gpu)}; `flashladder run` uses them.\n"
                "# Written by `flashladder search`; delete an entry to have the rung's default again.\n"
            )
            temporary = path.with_name(f".{gpu}.new")
            temporary.write_text(header + yaml.safe_dump(dict(sorted(content.items())), sort_keys=False, width=120))
            temporary.replace(path)
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _title(gpu: str) -> str:
    return f"an {load_gpu(gpu).title}" if gpu in gpu_names() else f"{gpu}, which configs/gpus does not describe"


@lru_cache(maxsize=8)
def _winners(path: Path, text: str) -> tuple[Winner, ...]:
    """Every choice of a kernel asks for them, and they are many."""
    found = _parsed(path, text).items()
    return tuple(_winner(path, version, kind, entry) for version, kinds in found for kind, entry in kinds.items())


def _text(path: Path) -> str:
    """What the file has; nothing where there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _parsed(path: Path, text: str) -> dict[str, dict[str, Any]]:
    try:
        content = yaml_files.parsed(text) or {}
    except yaml.YAMLError as error:
        raise _damaged(path, error) from None
    if not _is_by_name(content) or not all(map(_is_by_name, content.values())):
        raise ConfigError(f"{path} is damaged: it should map rungs to their winners. Mend it, or delete it")
    return dict(content)


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged: {error}. Mend it, or delete it and tune again")


def _is_by_name(content: Any) -> bool:
    return isinstance(content, dict) and all(isinstance(name, str) for name in content)


def _winner(path: Path, version: str, kind: str, entry: Any) -> Winner:
    try:
        if (length := kind.partition(_LENGTH)[2]) and length not in LENGTHS:
            raise ConfigError(f"length={length} is not one of {listing(LENGTHS)}")
        evidence = dict(entry)
        if not isinstance(config := evidence.pop("config"), str):
            raise ConfigError(f"config is {config!r}, and should be such as block_m=128,block_n=64")
        return Winner(path.stem, version, kind, parse_values(config), evidence)
    except (TypeError, ValueError, KeyError, ConfigError) as error:
        raise ConfigError(f"{path}: the winner of {version} is damaged: {error}") from None
