"""Tensor maps of packed sequences: one for all, whose rows end where a sequence does."""

import pytest

from flashladder.common import catalog
from flashladder.common.compiler import translate
from flashladder.common.runtime.launch import packed_mapped


@pytest.mark.parametrize(("rows", "heads"), [(300, 2), (1, 2), (300, 1)])
def test_a_map_ends_where_a_sequence_does(rows, heads):
    """Row r of a sequence that ends before row `end` is found, and the row behind its last one is outside."""
    rung = catalog.find("place_of_q")
    (declared, *_) = translate(rung, rung.config(packed=True), "sm_90a").launch.tensor_maps
    strides = (0, 2048 if rows > 1 else 7, 128 if heads > 1 else 7)  # where there is one, a stride means nothing
    made = packed_mapped(declared, 1 << 20, "bf16", (1, rows, heads, 128), strides)
    for begin, end in {(0, rows), (rows // 3, rows // 2), (rows - 1, rows)} - {(0, 0)}:
        row = made.dims[1] - (end - begin)  # where the kernel has its first row
        of_row, of_head, of_end = made.strides
        address = (made.address + row * of_row + (heads - 1) * of_head + end * of_end) % 2**64
        assert address == (1 << 20) + (begin * 2048 if rows > 1 else 0) * 2 + (heads - 1) * 128 * 2
        assert row + end - begin == made.dims[1]
        assert end < made.dims[3]
