"""What the compiler made of a version and a configuration, kept as a folder of the cache.

The folder holds config.cuh, kernel.ptx, kernel.cubin, build.log and, written last, artifact.json with the facts about
them and their digests, by which a damaged folder is known.
"""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flashladder.common.build.cubin import code_digest
from flashladder.common.config import KernelConfig
from flashladder.common.errors import BuildError

ENTRY = "attention_forward"
HEADER, PTX, CUBIN, LOG, FACTS = "config.cuh", "kernel.ptx", "kernel.cubin", "build.log", "artifact.json"


@dataclass(frozen=True)
class LaunchInfo:
    """What the kernel declares about its launch (FLASHLADDER_LAUNCH in common/cuda/params.cuh)."""

    num_threads: int
    shared_bytes: int  # dynamic shared memory of one CTA
    block_m: int
    block_n: int
    params_bytes: int  # size of AttentionParams


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel and what the compiler said of it."""

    version: str  # the rung's name, "02_swizzling"
    config: KernelConfig
    arch: str
    directory: Path
    registers: int  # of one thread
    spill_store_bytes: int  # of one thread, as ptxas counts them
    spill_load_bytes: int
    stack_bytes: int
    launch: LaunchInfo
    compile_seconds: float
    cached: bool

    entry = ENTRY

    @property
    def cubin(self) -> Path:
        return self.directory / CUBIN

    @property
    def ptx(self) -> Path:
        return self.directory / PTX

    @property
    def key(self) -> str:
        """Equal where kernel, headers, configuration, arch, flags and compiler are: the end of the folder's name."""
        return self.directory.name.rpartition("-")[2]

    @cached_property
    def code(self) -> str:
        """Equal where the machine code is, wherever and from whatever it was compiled."""
        return code_digest(self.cubin)

    @property
    def log(self) -> Path:
        """What nvcc and ptxas printed."""
        return self.directory / LOG

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory, above 0 when registers spill or an array does not fit them."""
        return max(self.stack_bytes, self.spill_store_bytes, self.spill_load_bytes)


def seal(directory: Path, version: str, config: KernelConfig, arch: str, compile_seconds: float) -> None:
    """Reads the compiler's outputs in a folder and writes artifact.json, which makes the folder an artifact."""
    artifact = Artifact(
        version,
        config,
        arch,
        directory,
        **_resources((directory / LOG).read_text()),
        launch=_launch_info((directory / PTX).read_text()),
        compile_seconds=compile_seconds,
        cached=False,
    )
    facts = dataclasses.asdict(artifact)
    del facts["directory"], facts["cached"]
    facts["config"] = config.name
    facts["digests"] = _digests(directory)
    (directory / FACTS).write_text(json.dumps(facts, indent=1))


def load(directory: Path, cached: bool) -> Artifact | None:
    """The artifact in a folder; None when there is none, or when it is damaged."""
    try:
        facts = json.loads((directory / FACTS).read_text())
        if facts.pop("digests") != _digests(directory):
            return None
        config, launch = KernelConfig.parse(facts.pop("config")), LaunchInfo(**facts.pop("launch"))
        return Artifact(config=config, launch=launch, directory=directory, cached=cached, **facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digests(directory: Path) -> dict[str, str]:
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in (PTX, CUBIN, LOG)}


def _resources(log: str) -> dict[str, int]:
    """Registers, stack and spills from the log of `ptxas -v`."""
    stack = re.search(
        rf"Function properties for {ENTRY}\s+"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        log,
    )
    registers = re.search(r"Used (\d+) registers", log)
    if stack is None or registers is None:
        raise BuildError(f"ptxas says nothing of a kernel {ENTRY}; it printed:\n{log.strip()}")
    return {
        "registers": int(registers[1]),
        "stack_bytes": int(stack[1]),
        "spill_store_bytes": int(stack[2]),
        "spill_load_bytes": int(stack[3]),
    }


def _launch_info(ptx: str) -> LaunchInfo:
    """The constant launch_info, an array of 32-bit words that PTX spells as words or as bytes."""
    match = re.search(r"\.align 4 \.(b8|u32|b32) launch_info\[\d+\] = \{([\d, ]+)\}", ptx)
    numbers = [int(number) for number in match[2].split(",")] if match else []
    if match and match[1] == "b8":
        numbers += [0] * (-len(numbers) % 4)  # trailing zeros may be left out
        numbers = [int.from_bytes(bytes(numbers[i : i + 4]), "little") for i in range(0, len(numbers), 4)]
    if len(numbers) != len(dataclasses.fields(LaunchInfo)):
        raise BuildError("the kernel declares no launch_info; put FLASHLADDER_LAUNCH(...) of params.cuh into it")
    return LaunchInfo(*numbers)
