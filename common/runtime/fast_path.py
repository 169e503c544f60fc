"""A call in C++: fast_path.cpp, and node.cpp for its gradients, which are compiled beside the program, and used from
when they are there.

Until then, where it cannot be compiled, and for what is out of the ordinary, calls go through Python
(common/runtime/calls.py), which launches the same. FLASHLADDER_FAST=0 turns it off: nothing is compiled or loaded.
"""

from __future__ import annotations

import os
import threading
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

import torch
from torch.autograd import forward_ad

from flashladder.common.catalog import ladder_of
from flashladder.common.compiler import library
from flashladder.common.errors import FlashLadderError, ToolchainError
from flashladder.common.own import FIRST
from flashladder.common.runtime.outputs import new_o
from flashladder.common.runtime.plan import Plan

SOURCE = Path(__file__).with_suffix(".cpp")
NODE = SOURCE.with_name("node.cpp")
_preparing = threading.Lock()
EXCHANGE = "__dlpack_c_exchange_api__"
FAST = "FLASHLADDER_FAST"

extension: ModuleType | None = None  # from when it is there
NOT_ASKED = "no call was made ready yet"
missing = NOT_ASKED  # why it is not there
node: ModuleType | None = None  # likewise, after the extension
node_missing = NOT_ASKED


def prepare() -> None:
    """Loads what is built; else has it built beside the program. Once; not where it is turned off."""
    global missing
    with _preparing:
        if missing != NOT_ASKED:
            return
        missing = "it is being compiled"
    if is_off():
        load()
        return
    steps = [(SOURCE, _load_extension), (NODE, _load_node)]
    while steps and library.find_extension(steps[0][0]):
        steps.pop(0)[1]()
    if steps:
        load_rest = lambda: [step() for _, step in steps]  # noqa: E731
        threading.Thread(target=load_rest, name=f"flashladder: {steps[0][0].name}", daemon=True).start()


def load() -> None:
    """Builds what is not built, and has calls go through it from now on; `missing` and `node_missing` say why not."""
    _load_extension()
    _load_node()


def _load_extension() -> None:
    """Of threads that are about it at a time, the first one's stays."""
    global extension, missing
    try:
        found = made()
    except (FlashLadderError, OSError, ImportError) as error:
        if not extension:
            missing = str(error).splitlines()[0]
    else:
        if not extension:
            extension, missing = found, ""


def _load_node() -> None:
    """Likewise; without the extension it is of no use."""
    global node, node_missing
    if not extension:
        node_missing = missing
        return
    try:
        found = made_node()
    except (FlashLadderError, OSError, ImportError) as error:
        node_missing = str(error).splitlines()[0]
    else:
        node, node_missing = node or found, ""


def is_off() -> bool:
    """Whether a user wants no call to go through C++."""
    return os.environ.get(FAST) == "0"


def require() -> None:
    """ToolchainError where it is turned off, or something for it is missing."""
    if is_off():
        raise ToolchainError(f"{FAST}=0 turns it off")
    if not hasattr(torch.Tensor, EXCHANGE):
        raise ToolchainError(f"torch {torch.__version__} has no {EXCHANGE}, by which C++ reads tensors; torch 2.13 has")
    library.extension_command(SOURCE)


def made() -> ModuleType:
    """The extension. ToolchainError, BuildError or ImportError where it cannot be made."""
    require()
    return loaded(library.build_extension(SOURCE))


def made_node() -> ModuleType:
    """node.cpp's module, which common/api/differentiable.py sets up. Errors as `made`."""
    require()
    module = _imported(NODE.stem, library.build_extension(NODE))
    vars(module)["launched"] = (extension or made()).launched
    return module


def _imported(name: str, path: Path) -> ModuleType:
    loader = ExtensionFileLoader(name, str(path))
    module = module_from_spec(ModuleSpec(loader.name, loader, origin=loader.path))
    loader.exec_module(module)
    return module


def loaded(path: Path) -> ModuleType:
    """The extension as it is built there. ImportError where it cannot be loaded."""
    module = _imported(SOURCE.stem, path)
    types, of_outputs = (torch.Tensor, Plan), (torch.empty_like, new_o, torch.float32)
    long_from = ladder_of(FIRST).long_from
    module.set_up(getattr(torch.Tensor, EXCHANGE), *types, torch._C, vars(forward_ad), *of_outputs, long_from)
    return module
