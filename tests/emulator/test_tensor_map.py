"""Tensor maps without a driver: bit for bit those of the driver (`gpu`), and of ptxas, which knows where fields lie."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashladder.common.compiler.toolchain import find_tool, toolchain
from flashladder.common.emulator import tensor_map
from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.runtime.gpu import driver, require_gpu

BASE_ADDRESS = 0x7F12_3456_7800
BASE = {
    "address": BASE_ADDRESS,
    "dtype": "bf16",
    "dims": (128, 4096, 16, 2),
    "strides_bytes": (4096, 256, 1 << 20),
    "box": (64, 128, 1, 1),
    "swizzle_bytes": 128,
    "l2_promotion_bytes": 128,
}
# One parameter changed at a time, so that the driver's bytes tell where each lies.
CHANGES = [
    {},
    *({"address": BASE_ADDRESS + (1 << n)} for n in (4, 20)),
    *({"dtype": name, "box": (16, 128, 1, 1)} for name in tensor_map.DTYPES),
    *({"swizzle_bytes": n, "box": (16, 128, 1, 1)} for n in tensor_map.SWIZZLES),
    *({"l2_promotion_bytes": n} for n in tensor_map.L2_PROMOTIONS),
    *({"dims": tuple(5 + (m == n) for m in range(4))} for n in range(4)),
    *({"strides_bytes": tuple(16 << 10 * (m == n) for m in range(3))} for n in range(3)),
    *({"strides_bytes": tuple((1 << 39) + 16 if m == n else 16 for m in range(3))} for n in range(3)),
    *({"box": tuple(8 if m == n or not m else 1 for m in range(4))} for n in range(4)),
    {"dims": (1000,), "strides_bytes": (), "box": (64,), "swizzle_bytes": 0},
    {"dims": (1 << 32,), "strides_bytes": (), "box": (64,), "swizzle_bytes": 0},
    {"dims": (1000, 7), "strides_bytes": (2048,), "box": (64, 256)},
    {"dims": (1000, 7, 3), "strides_bytes": (2048, 32768), "box": (64, 8, 3)},
    {"dims": (64, 7, 3, 2, 9), "strides_bytes": (128, 1024, 4096, 8192), "box": (64, 7, 3, 2, 9)},
]


def shown(data):
    """Eight words of 32 bits a line."""
    words = [f"{int.from_bytes(data[at : at + 4], 'little'):08x}" for at in range(0, 128, 4)]
    return "\n".join("  " + " ".join(words[at : at + 8]) for at in range(0, 32, 8))


def made_by_driver(address, dtype, dims, strides_bytes, box, swizzle_bytes, l2_promotion_bytes):
    """cuTensorMapEncodeTiled's 128 bytes."""
    api = driver()
    names = {"fp16": "FLOAT16", "fp32": "FLOAT32", "fp64": "FLOAT64", "bf16": "BFLOAT16"}
    status, made = api.cuTensorMapEncodeTiled(
        getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{names.get(dtype, dtype.upper())}"),
        len(dims),
        address,
        [api.cuuint64_t(dim) for dim in dims],
        [api.cuuint64_t(stride) for stride in strides_bytes or (0,)],
        [api.cuuint32_t(n) for n in box],
        [api.cuuint32_t(1)] * len(dims),
        api.CUtensorMapInterleave(0),
        api.CUtensorMapSwizzle(tensor_map.SWIZZLES.index(swizzle_bytes)),
        api.CUtensorMapL2promotion(tensor_map.L2_PROMOTIONS.index(l2_promotion_bytes)),
        api.CUtensorMapFloatOOBfill(0),
    )
    assert not status, f"the driver refused it: {status!r}"
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


@pytest.mark.gpu
def test_the_driver_makes_the_same():
    """All of the table at once: a failure shows both sides of each map that differs, word for word."""
    require_gpu()
    memory = torch.empty(1 << 21, dtype=torch.uint8, device="cuda")  # addresses are those of a tensor
    wrong = []
    for change in CHANGES:
        asked = {**BASE, **change}
        asked["address"] += memory.data_ptr() - BASE_ADDRESS
        own, its = tensor_map.encode(**asked), made_by_driver(**asked)
        print(f"{change}\n{shown(its)}")
        if own != its:
            wrong.append(f"{change}: the driver made\n{shown(its)}\nand not\n{shown(own)}")
    assert not wrong, "\n".join(wrong)


def recorded():
    """What a driver made: the arguments and the map."""
    lines = Path(__file__).with_name("driver_maps.txt").read_text().splitlines()[1:]
    for change, words in zip(lines[::2], lines[1::2], strict=True):
        made = b"".join(int(word, 16).to_bytes(4, "little") for word in words.split())
        yield pytest.param({**BASE, **json.loads(change)}, made.ljust(128, b"\0"), id=change)


@pytest.mark.parametrize(("asked", "made"), list(recorded()))
def test_maps_are_those_that_a_driver_made(asked, made):
    assert tensor_map.encode(**asked) == made
    found = tensor_map.decode(made)
    assert (found.address, found.dims) == (asked["address"], tuple(asked["dims"]))


# -- where ptxas puts each field

STRIDE_BITS = 0xAB12345670
FIELDS = {  # tensormap.replace's field and ordinal: what is changed, from and to
    "rank": ("b32", {"dims": (64, 2, 2, 2, 2), "strides_bytes": (128, 256, 512, 1024), "box": (8, 1, 1, 1, 1)}, 4),
    "swizzle_mode": ("b32", {"swizzle_bytes": 64}, 2),
    "elemtype": ("b32", {"dtype": "fp16"}, 6),
    **{f"global_dim {n}": ("b32", {"dims": tuple(77 if m == n else 1 for m in range(4))}, 77) for n in range(4)},
    **{f"box_dim {n}": ("b32", {"box": tuple(24 if m == n else 8 for m in range(4))}, 24) for n in range(4)},
    **{
        f"global_stride {n}": ("b64", {"strides_bytes": tuple(STRIDE_BITS * (m == n) for m in range(3))}, STRIDE_BITS)
        for n in range(3)
    },
    "global_address": ("b64", {"address": 0x7654_3210_ABC0}, 0x7654_3210_ABC0),
}  # fmt: skip


@pytest.fixture(scope="module")
def replaced_words(tmp_path_factory):
    """For each field, the words of the map that ptxas's code for tensormap.replace stores to, as offsets."""
    text = ".version 8.7\n.target sm_90a\n.address_size 64\n"
    for number, (field, (type, _, value)) in enumerate(FIELDS.items()):
        name, _, ordinal = field.partition(" ")
        operands = f"{ordinal}, {value}" if ordinal else f"{value}"
        text += f""".visible .entry field_{number}()
        {{
            .shared .align 128 .b8 map[128];
            .reg .b64 at;
            mov.u64 at, map;
            tensormap.replace.tile.{name}.shared::cta.b1024.{type} [at], {operands};
            ret;
        }}
        """
    source, cubin = (tmp_path_factory.mktemp("map") / f"map.{ending}" for ending in ("ptx", "cubin"))
    source.write_text(text)
    subprocess.run([toolchain().ptxas, "-arch=sm_90a", source, "-o", cubin], check=True)
    sass = subprocess.run([find_tool("nvdisasm"), "-c", cubin], check=True, capture_output=True, text=True).stdout
    found = {}
    for part in sass.split(".text.field_")[1:]:
        stores = re.findall(r"STS(\.64)? \[UR\d+(?:\+(0x[0-9a-f]+))?\]", part)
        words = {int(at or "0", 16) + 4 * n for wide, at in stores for n in range(2 if wide else 1)}
        found.setdefault(list(FIELDS)[int(re.match(r"\d+", part)[0])], set()).update(words)
    return found


@pytest.mark.parametrize("field", FIELDS)
def test_fields_lie_where_ptxas_puts_them(field, replaced_words):
    """Changing one parameter changes words that ptxas's code for that field writes, and no others."""
    _, change, _ = FIELDS[field]
    calm = {"dims": (1,) * 4, "strides_bytes": (0,) * 3, "box": (8,) * 4, "swizzle_bytes": 128, "dtype": "uint16"}
    if field == "rank":
        changed = tensor_map._RANK.put(5) ^ tensor_map._RANK.put(1)
        different = {at for at in range(0, 128, 4) if changed >> 8 * at & 0xFFFFFFFF}
    else:
        before, after = (tensor_map.encode(**{**BASE, **calm, **part}) for part in ({}, change))
        different = {at for at in range(0, 128, 4) if before[at : at + 4] != after[at : at + 4]}
    assert different
    derived = {64, 72}  # the bytes of a box and its alignment, which only the driver sets
    assert different - derived <= replaced_words[field]


# -- what comes back

DIM = st.integers(1, 1 << 32)
STRIDE = st.integers(0, (1 << 36) - 1).map(lambda n: 16 * n)


@given(
    data=st.data(),
    dtype=st.sampled_from(sorted(tensor_map.DTYPES)),
    swizzle=st.sampled_from(tensor_map.SWIZZLES),
    rank=st.integers(1, 5),
)
def test_decode_undoes_encode(data, dtype, swizzle, rank):
    size = tensor_map.DTYPES[dtype][1]
    rows = st.integers(1, min((swizzle or 256 * size) // 16, 256 * size // 16)).map(lambda n: 16 * n // size)
    asked = tensor_map.TensorMap(
        address=16 * data.draw(st.integers(0, (1 << 60) - 1)),
        dtype=dtype,
        dims=data.draw(st.tuples(*[DIM] * rank)),
        strides=data.draw(st.tuples(*[STRIDE] * (rank - 1))),
        box=(data.draw(rows), *data.draw(st.tuples(*[st.integers(1, 256)] * (rank - 1)))),
        swizzle_bytes=swizzle,
    )
    made = tensor_map.encode(asked.address, dtype, asked.dims, asked.strides, asked.box, swizzle)
    assert len(made) == 128
    assert tensor_map.decode(made) == asked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 0x1008}, "address at a multiple of 16 bytes, not 0x1008"),
        ({"strides_bytes": (4096, 250, 512)}, r"multiples of 16 bytes below 2\^40, not \(4096, 250, 512\)"),
        ({"strides_bytes": (4096, 256)}, "3 strides and a box of 4, not 2 and 4"),
        ({"dims": (), "strides_bytes": (), "box": ()}, "1 to 5 dimensions, not 0"),
        ({"dims": (128, 0, 1, 1)}, "dimensions of 1"),
        ({"box": (64, 257, 1, 1)}, "box of 1 to 256"),
        ({"box": (72, 1, 1, 1)}, "within the swizzle's 128 bytes, not 144"),
        ({"box": (4, 1, 1, 1)}, "multiples of 16 bytes, not 8"),
        ({"swizzle_bytes": 96}, "swizzle of"),
        ({"l2_promotion_bytes": 32}, "L2 promotion of"),
        ({"dtype": "e4m3"}, "e4m3 elements; there are uint8"),
    ],
)
def test_what_tma_cannot_take_is_refused(change, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        tensor_map.encode(**{**BASE, **change})


@pytest.mark.parametrize("data", [b"\xff" * 128, b"\0" * 64])
def test_other_bytes_are_no_map(data):
    with pytest.raises(UnsupportedProblemError):
        tensor_map.decode(data)
