"""python -m flashladder.tests.first_calls.qwen3 [PROCESSES]: a compiled Qwen3 gives the same bits at each call.

Each process compiles it anew, and keeps nothing that another one compiled or measured. Of each call it keeps what our
attention was given and what it gave, layer by layer: so a difference is shown to be ours, where equal inputs gave other
outputs, or torch's, where the first inputs that differ are those of a layer whose predecessors agree. Then torch's own
attention runs in the same way, in the process that saw the difference. In every other process the first two calls go
through Python. Exit code 1 where a call differs.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import flashladder
from flashladder.common.api import operator
from flashladder.common.runtime import fast_path
from flashladder.tests.first_calls.forks import each_in_a_fork, require_fresh
from flashladder.tests.first_calls.poison import poison
from flashladder.tests.first_calls.run import build_extension
from flashladder.tests.first_calls.table import GPU
from flashladder.tests.first_calls.trial import BUILT, LATER, count_differing, prepare

PROCESSES, AT_A_TIME, SECONDS = 20, 8, 280
CALLS, AGAIN = 4, 8  # of a model; of attention alone, of what a model gave it
TOKENS = 777
OURS, TORCHS = "ladder", "sdpa"
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
Recorded = list[dict[str, torch.Tensor]]  # of each layer


def main(processes: int = PROCESSES, device: str = GPU, backend: str = "inductor") -> int:
    begin, wrong = time.monotonic(), 0
    if device == GPU:
        build_extension()
    require_fresh()
    tasks = [(number, device, backend) for number in range(processes)]
    for (number, *_), lines, how in each_in_a_fork(compiled_anew, tasks, AT_A_TIME, SECONDS):
        wrong += bool(how or lines)
        for line in [how] if how else lines:
            print(f"process {number}: {line}", flush=True)
    print(f"{processes} processes in {time.monotonic() - begin:.0f} s, in {wrong} calls differed")
    return 1 if wrong or not processes else 0


def compiled_anew(task: tuple[int, str, str]) -> list[str]:
    """What differs between the calls of one process, in words."""
    number, device, backend = task
    prepare(LATER if number % 2 else BUILT)
    with tempfile.TemporaryDirectory(prefix="inductor-") as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are as many processes as cores allow
        flashladder.register_with_transformers()
        logits, recorded, graphs = _calls(OURS, device, backend)
        lines = _differing("logits", logits)
        if device == GPU and not fast_path.extension:
            lines.append(f"C++ is not there: {fast_path.missing}")
        if any(len(layers) != SIZES["num_hidden_layers"] for layers in recorded):
            lines.append(f"attention of ours ran {[len(layers) for layers in recorded]} times in calls of 3 layers")
        if lines:
            lines += [f"graphs that torch had compiled after each call: {graphs}", *_layers(recorded)]
            lines += [
                f"torch's own attention: {line}" for line in _differing("logits", _calls(TORCHS, device, backend)[0])
            ]
    return lines


def _calls(implementation: str, device: str, backend: str) -> tuple[list[torch.Tensor], list[Recorded], list[int]]:
    """Of calls of a model that is compiled for them: logits, what our attention did, and graphs until then."""
    import torch._dynamo  # here, as it may ask for GPUs, after which no fork can
    import transformers
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).to(torch.bfloat16).eval()
        ids = torch.randint(0, SIZES["vocab_size"], (1, TOKENS if device == GPU else 20))
    model.set_attn_implementation(implementation)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    logits, recorded, graphs = [], [], []
    usual = operator.attend_here  # what the compiled model calls, before it is known whether in C++
    for number in range(CALLS):
        if number == 2 and device == GPU and not fast_path.extension:
            fast_path.load()
        poison(device)
        layers: Recorded = []
        operator.attend_here = _recording(usual, layers)
        with torch.no_grad():
            logits.append(compiled(ids).logits.clone())
        recorded.append(layers)
        graphs.append(counters["stats"]["unique_graphs"])
    operator.attend_here = usual
    return logits, recorded, graphs


def _recording(attend: Callable[..., Any], layers: Recorded) -> Callable[..., Any]:
    """The same function, of which each call leaves copies of what it was given and gave."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> Any:
        given = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        found = attend(q, k, v, *more)
        layers.append({**given, "o": found[0].clone()})
        return found

    return call


def _differing(name: str, calls: list[torch.Tensor]) -> list[str]:
    first, *further = calls
    counts = [(number, other, count_differing(first, other)) for number, other in enumerate(further, 2)]
    return [
        f"{name} of call {number} differ from those of call 1 in {count} of {first.numel()} elements, the largest "
        f"difference {float((first.double() - other.double()).abs().max()):.3g}"
        for number, other, count in counts
        if count
    ]


def _layers(recorded: list[Recorded]) -> list[str]:
    """Whose the first difference is: of the layers in their order, what attention was given, and gave."""
    lines: list[str] = []
    whose = "TORCH'S: attention was given and gave the same in all calls"
    for layer, calls in enumerate(zip(*recorded, strict=False)):
        found = {name: _differing(f"layer {layer}: {name}", [call[name] for call in calls]) for name in "qkvo"}
        given = [*found["q"], *found["k"], *found["v"]]
        if not lines and given:
            whose = f"TORCH'S: what attention is given in layer {layer} differs, and nothing before it does"
        elif not lines and found["o"]:
            whose = f"OURS: in layer {layer} attention gives other outputs of equal inputs. {_again(calls)}"
        lines += [*given, *found["o"]]
    return [whose, *lines]


def _again(calls: tuple[dict[str, torch.Tensor], ...]) -> str:
    """Which of the recorded outputs attention gives when it is called again, of the same inputs."""
    q, k, v = (calls[0][name] for name in "qkv")
    with torch.no_grad():
        again = [flashladder.attention(q, k, v, causal=True) for _ in range(AGAIN)]
    alike = [sum(not count_differing(call["o"], o) for o in again) for call in calls]
    return f"Of {AGAIN} further calls as many gave the bits of call 1, 2, ...: {alike}"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
