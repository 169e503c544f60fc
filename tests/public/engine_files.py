"""The Python files of engines' published wheels, imported without what they need beyond torch.

Nothing of an engine is installed: its files lie in a folder, and each module that they import and that needs more than
torch is replaced by a stand-in of the list here. So what is tested is that our backends fit the engines' own classes
and registries; no model is served.
"""

import ast
import contextlib
import enum
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import pytest

from flashladder.common.api.frontends.engines import TRIED
from flashladder.common.paths import cache_dir

SECONDS = 600
ANY_PYTHON = ["--python-version=3.11", "--abi=cp311", "--abi=abi3"]
ANY_PYTHON += [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 31, 34, 35)]


def files_of(engine):
    """The folder of the files of the pinned release; the test is skipped where the wheel cannot be had."""
    pinned = f"{engine}-{TRIED[engine]}"
    folder = cache_dir() / "public" / pinned
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        Path(folder.parent, f"{engine}.lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=folder.parent) as part,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # other tests may want them too
        try:
            if not folder.exists():
                with zipfile.ZipFile(_wheel(engine, pinned, Path(part))) as wheel:
                    wheel.extractall(Path(part, "files"), [name for name in wheel.namelist() if name.endswith(".py")])
                Path(part, "files").rename(folder)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            pytest.skip(f"no wheel of {pinned}: {said[-1]}. FLASHLADDER_PUBLIC=DIR names a folder that has it")
    return folder


def _wheel(engine, pinned, part):
    if named := os.environ.get("FLASHLADDER_PUBLIC"):
        found = [*Path(named).glob(f"{pinned}-*.whl")]
        if not found:
            raise FileNotFoundError(f"none in {named}")
        return found[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *ANY_PYTHON]
    command += ["--dest", part, f"{engine}=={TRIED[engine]}"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    return next(part.glob("*.whl"))


def _no_group():
    raise AssertionError("there is one process")


def _resolved(name):
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


def _as_it_is(function):
    return function


def _of_source(path, name):
    """One class of a file that needs more than there is."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    scope = {"IntEnum": enum.IntEnum, "auto": enum.auto}
    exec(compile(tree, str(path), "exec"), scope)
    return scope[name]


def _no(*_):
    return False


# Packages whose __init__.py imports the engine; their other files are the wheel's.
FOLDERS = {
    "vllm": (
        *("vllm", "vllm.config", "vllm.distributed", "vllm.model_executor", "vllm.model_executor.layers", "vllm.utils"),
        *(f"vllm.model_executor.layers.quantization{inner}" for inner in ("", ".utils")),
    ),
    "sglang": (
        *("sglang", "sglang.kernels", "sglang.srt", "sglang.srt.model_executor", "sglang.srt.layers"),
        *(f"sglang.srt.{name}" for name in ("layers.attention", "arg_groups", "configs", "utils")),
    ),
}


def _modules(engine, files):
    """Modules that are replaced whole, with the names that the files take from them."""
    if engine == "vllm":
        quantised = ("kFp8Dynamic64Sym", "kFp8Dynamic128Sym", "kFp8StaticTensorSym", "kNvfp4Dynamic")
        processes = {"get_dcp_world_size_and_rank": lambda _: (1, 0), "get_pcp_group": _no_group}
        return {
            "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
            "vllm.distributed.parallel_state": processes,
            "vllm.logger": {"init_logger": logging.getLogger},
            "vllm.model_executor.layers.quantization.utils.quant_utils": dict.fromkeys(quantised),
            "vllm.utils.import_utils": {"resolve_obj_by_qualname": _resolved},
            "vllm.utils.torch_utils": {"get_dtype_size": lambda dtype: dtype.itemsize},
        }
    hybrid = ("glm5_next", "hybrid_gdn", "hybrid_kda", "hybrid_lightning", "kimi_linear", "mamba2", "mambaish")
    forward = _of_source(files / "sglang/srt/model_executor/forward_batch_info.py", "ForwardMode")
    graphs = ("get_prefill_raw_num_tokens", "is_in_full_prefill_graph", "is_in_prefill_graph_scope")
    return {
        "sglang.kernels.kernel_api_logging": {"debug_kernel_api": _as_it_is},
        "sglang.srt.arg_groups.overrides": dict.fromkeys(("attention_backends_of", "resolved_view")),
        "sglang.srt.configs.hybrid_arch": dict.fromkeys(f"{name}_config" for name in hybrid),
        "sglang.srt.configs.linear_attn_model_registry": dict.fromkeys(
            ("get_linear_attn_config", "import_backend_class")
        ),
        "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": forward},
        "sglang.srt.model_executor.forward_context": {"get_attn_backend": None},
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph": {
            "eager_on_graph": _as_it_is,
            "is_in_breakable_cuda_graph": _no,
        },
        "sglang.srt.model_executor.runner_utils.forward_batch": {"get_forward_batch": None},
        "sglang.srt.model_executor.runner_utils.prefill_graph": dict.fromkeys(graphs, _no),
        "sglang.srt.runtime_context": dict.fromkeys(("get_parallel", "get_platform", "get_spec")),
        "sglang.srt.utils": {"get_device_capability": None, "is_hip": _no, "is_musa": _no, "is_npu": _no},
        "sglang.srt.utils.common": {"is_npu": _no},
    }


@contextlib.contextmanager
def importable(engine):
    """The engine's files can be imported, with stand-ins for what they lack; afterwards no module of it is left."""
    files, before = files_of(engine), dict(sys.modules)
    try:
        for name in FOLDERS[engine]:
            sys.modules[name] = _module(name, {"__path__": [str(files.joinpath(*name.split(".")))]})
        for name, names in _modules(engine, files).items():
            known = vars(sys.modules.get(name, _module(name, {})))
            sys.modules[name] = _module(name, {**{k: v for k, v in known.items() if k == "__path__"}, **names})
        yield files
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith((engine, f"flashladder.common.api.frontends.{engine}")):
                del sys.modules[name]


def _module(name, names):
    module = types.ModuleType(name)
    vars(module).update(names)
    return module
