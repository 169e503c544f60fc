"""Lay a wheel out as a kernel of Hugging Face's `kernels`: a folder that its get_kernel loads, here or from the Hub.

FLASHLADDER_ARCHS="8.0;9.0a" pip wheel . --no-deps        a wheel with kernels in it
flashladder hub flashladder-0.1.0-py3-none-any.whl     writes ./flashladder-kernel
flashladder hub WHEEL --out DIR --backend cuda cpu     for a torch without CUDA too: the emulator runs there
flashladder hub WHEEL --source                         the same as sources of their kernel-builder

    from kernels import get_local_kernel
    flash_attn_func = get_local_kernel(Path("flashladder-kernel")).flash_attn_func

Each backend has a folder build/torch-BACKEND: a variant of Python and cubins, which fits any torch. With --source there
are build.toml, flake.nix and torch-ext/flashladder in its place, of which `kernel-builder build-and-copy` makes such
variants by Nix (their edition 5; it was not run here). Either brings flashladder along, but none of what that needs of
others, for which `kernels` has no place: numpy, PyYAML, pydantic, rich, nvidia-ml-py and cuda-bindings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

from flashladder.common.console import Parser, console
from flashladder.common.errors import ConfigError, ResultsError

BACKENDS = ("cuda", "cpu")
NAMES = (
    *("attention", "packed_attention", "merge_states", "register_with_diffusers", "register_with_torch"),
    *("register_with_transformers", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"),
    *("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"),
    *("flash_attn_with_kvcache", "reshape_and_cache", "tree_mask", "flash_mla_with_kvcache", "get_mla_metadata"),
    "concat_and_cache_mla",
)
VERSION = 1  # of the kernel, as `kernels` counts
LICENSE = "Apache-2.0"
DOOR = '''"""flashladder as a kernel: the package beside this file, whose functions these are."""

import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, _HERE)
try:
    import flashladder
finally:
    sys.path.remove(_HERE)
if not str(Path(flashladder.__file__).resolve()).startswith(_HERE):
    raise ImportError(f"flashladder is imported from {{flashladder.__file__}} already: one of the two can be used")

from flashladder import ({names})  # noqa: E402

__all__ = [{quoted}]
'''
BUILD = """[general]
name = "flashladder"
version = {version}
edition = 5
license = "{license}"
backends = [{backends}]

[torch-noarch]
pyext = [{endings}]
"""
FLAKE = """{
  description = "FlashLadder's attention";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""


def parser() -> Parser:
    """The options."""
    made = Parser(__doc__)
    made.add_argument("wheel", type=Path, metavar="WHEEL", help="that pip made of this project")
    made.add_argument("--out", type=Path, default=Path("flashladder-kernel"), metavar="DIR", help="a new folder")
    made.add_argument("--backend", nargs="+", choices=BACKENDS, default=["cuda"], help="of torch (default: cuda)")
    made.add_argument("--source", action="store_true", help="as sources of kernel-builder")
    return made


def main(arguments: argparse.Namespace) -> int:
    wheel, out, backends = arguments.wheel, arguments.out, list(dict.fromkeys(arguments.backend))
    if out.exists():
        raise ConfigError(f"{out} is there already: name a new folder with --out")
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = [name for name in archive.namelist() if name.startswith("flashladder/")]
            if "flashladder/common/api/__init__.py" not in files:
                raise ConfigError(f"{wheel} is no wheel of flashladder: pip wheel . --no-deps makes one")
            if arguments.source:
                _extract(archive, files, out / "torch-ext" / "flashladder")
                (out / "build.toml").write_text(_build(files, backends))
                (out / "flake.nix").write_text(FLAKE)
            for backend in () if arguments.source else backends:
                variant = out / "build" / f"torch-{backend}"
                _extract(archive, files, variant)
                (variant / "metadata.json").write_text(_metadata(wheel, backend))
    except (OSError, zipfile.BadZipFile) as error:
        shutil.rmtree(out, ignore_errors=True)
        raise ResultsError(f"cannot lay {wheel} out: {error}") from error
    kernels = sum("/prebuilt/" in name and name.endswith(".cubin") for name in files)
    made = "build.toml" if arguments.source else ", ".join(f"torch-{backend}" for backend in backends)
    console.print(f"{out}: {made}, with {kernels} kernels")
    return 0


def _extract(archive: zipfile.ZipFile, files: list[str], folder: Path) -> None:
    """The package, and the module beside it through which `kernels` comes in."""
    archive.extractall(folder, files)
    (folder / "__init__.py").write_text(DOOR.format(names=", ".join(NAMES), quoted=_quoted(NAMES)))


def _build(files: list[str], backends: list[str]) -> str:
    """As kernel-builder reads it. It copies files with the endings that are named."""
    endings = sorted({Path(file).suffix.removeprefix(".") for file in files})
    return BUILD.format(version=VERSION, license=LICENSE, backends=_quoted(backends), endings=_quoted(endings))


def _quoted(words: Sequence[str]) -> str:
    return ", ".join(f'"{word}"' for word in words)


def _metadata(wheel: Path, backend: str) -> str:
    """As `kernels` reads it; the id is the module's name, one for each wheel."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]
    content = {
        "name": "flashladder",
        "id": f"_flashladder_{backend}_{digest}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
    }
    return json.dumps(content, indent=2) + "\n"
