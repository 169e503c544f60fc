"""Runs a few lines of PTX on one value a thread, written as text: no compiler needed. On the emulator, or on any other
machine that can do what Emulated does (on_gpu.py)."""

import numpy as np

from flashladder.common import emulator

PTX_CLASS = {"u2": "b16", "u4": "b32", "u8": "b64", "f4": "f32", "f8": "f64", "?": "pred"}


class Emulated:
    """Tensors and launches on the emulator."""

    def __init__(self):
        self.memory = emulator.GlobalMemory()
        self.add, self.read = self.memory.add, self.memory.read

    def run(self, text, params, grid, num_threads, shared_bytes, **options):
        """Executes the entry `kernel` of a PTX module."""
        return emulator.run(
            text, params, (grid, 1, 1), num_threads, shared_bytes, self.memory, entry="kernel", **options
        )


def run_lanes(
    code, inputs=None, outputs=None, *, registers="", declarations="", num_threads=32, grid=1, shared_bytes=0,
    machine=None, **options,
):  # fmt: skip
    """Executes `code` on every thread.

    Args:
        code: PTX statements on registers that are named as the inputs and outputs.
        inputs: arrays of one value a thread (numpy type u2, u4, u8, f4, f8, or bool for a predicate).
        outputs: numpy type codes by name.
        registers: further `.reg` declarations.
        declarations: statements before the entry.
        machine: where it runs; by default on the emulator.

    Returns:
        The outputs by name, and the report.
    """
    inputs, outputs = inputs or {}, outputs or {}
    threads = num_threads * grid
    memory = machine or Emulated()
    params, declared, loads, stores = [], [registers], [], []
    for name, values in inputs.items():
        values = np.asarray(values)
        assert len(values) == threads
        code_of = "?" if values.dtype == bool else values.dtype.str[1:]
        params.append((name, memory.add(name, values.view("u1") if code_of == "?" else values, readonly=True)))
        declared.append(f".reg .{PTX_CLASS[code_of]} {name};")
        loads.append(access("ld", name, code_of))
    for name, code_of in outputs.items():
        size = 1 if code_of == "?" else np.dtype(code_of).itemsize
        params.append((name, memory.add(name, np.zeros(threads * size, np.uint8), initialised=False)))
        declared.append(f".reg .{PTX_CLASS[code_of]} {name};")
        stores.append(access("st", name, code_of))
    text = f"""
.version 8.7
.target sm_90a
.address_size 64
{declarations}
.visible .entry kernel({", ".join(f".param .u64 pointer_{name}" for name, _ in params)})
{{
    .reg .b64 thread_, base_, at_;
    .reg .b32 tid_, cta_, size_, byte_;
    {" ".join(declared)}
    mov.u32 tid_, %tid.x;
    mov.u32 cta_, %ctaid.x;
    mov.u32 size_, %ntid.x;
    mad.lo.u32 tid_, cta_, size_, tid_;
    cvt.u64.u32 thread_, tid_;
    {"".join(loads)}
    {code}
    {"".join(stores)}
    ret;
}}
"""
    packed = np.array([address for _, address in params], np.uint64).tobytes()
    report = memory.run(text, packed, grid, num_threads, shared_bytes, **options)
    results = {name: memory.read(name).view("?" if code == "?" else code) for name, code in outputs.items()}
    return results, report


def access(kind, name, code):
    """Loads or stores a thread's element of a tensor."""
    size = 1 if code == "?" else np.dtype(code).itemsize
    lines = [f"ld.param.u64 base_, [pointer_{name}];", f"mad.lo.u64 at_, thread_, {size}, base_;"]
    if code != "?":
        lines.append(
            f"ld.global.b{8 * size} {name}, [at_];" if kind == "ld" else f"st.global.b{8 * size} [at_], {name};"
        )
    elif kind == "ld":
        lines += ["ld.global.u8 byte_, [at_];", f"setp.ne.u32 {name}, byte_, 0;"]
    else:
        lines += [f"selp.u32 byte_, 1, 0, {name};", "st.global.u8 [at_], byte_;"]
    return "\n    ".join(lines) + "\n    "
