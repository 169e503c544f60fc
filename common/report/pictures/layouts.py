"""Pictures of memory: which lane or warp touches which elements, and in which banks they lie."""

from __future__ import annotations

from collections import Counter

from flashladder.common.report.pictures.device import COLS, ROWS, WARPS, DeviceHeaders
from flashladder.common.report.pictures.svg import BAD, CELL, COLOURS, GOOD, INK, MUTED, Svg

CHUNK = 8  # 16-bit elements of 16 bytes: what a lane copies, and a row of ldmatrix
BANKS = 64  # 16-bit elements across the 32 banks of 4 bytes
GROUPS = BANKS // CHUNK  # of four banks, 16 bytes each
QUAD = 4


def banks(headers: DeviceHeaders, layout: str) -> str:
    """Where the 16-byte chunks of 8 rows lie, and what reading one column of them costs."""
    read = 2  # the column of chunks that an ldmatrix reads
    chunks = COLS // CHUNK
    svg = Svg(f"8 rows of a tile in shared memory, layout {layout}")
    svg.heading(16, 28, f"8 rows of a {ROWS} x {COLS} tile in shared memory: {layout}")
    svg.text(16, 46, "a square is 16 bytes; the number is the column of 16 bytes that lies there", fill=MUTED)
    left, top = 76, 84
    for place in range(chunks):
        group = place % GROUPS
        svg.text(left + (place + 0.5) * CELL, top - 8, f"{4 * group}", 10, MUTED, "middle")
    svg.text(left - 8, top - 8, "bank", 10, MUTED, "end")
    hit: Counter[int] = Counter()
    outlined = []
    for row in range(8):
        svg.text(left - 8, top + row * CELL + 15, f"row {row}", 11, MUTED, "end")
        for chunk in range(chunks):
            offset = headers.offset(layout, row, chunk * CHUNK)
            x, y = left + offset % COLS // CHUNK * CELL, top + offset // COLS * CELL
            svg.cell(x, y, chunk, COLOURS[chunk % GROUPS])
            if chunk == read:
                hit[offset % BANKS // CHUNK] += 1
                outlined.append((x, y))
    for x, y in outlined:
        svg.rect(x, y, CELL, CELL, "none", INK, 2.5)
    waves = max(hit.values())
    verdict = f"one ldmatrix block, column {read} of 8 rows: {waves} wavefront{'s' if waves > 1 else ''}"
    groups = f"in {len(hit)} of {GROUPS} groups of four banks"
    svg.text(
        left, top + 8 * CELL + 24, f"{verdict}, as its 16-byte pieces lie {groups}", 12, BAD if waves > 1 else GOOD
    )
    return str(svg)


def panels(headers: DeviceHeaders) -> str:
    """The order in memory of the halves of a row, in one piece and in panels."""
    svg = Svg("A tile in one piece and in panels")
    for part, layout in enumerate(("Swizzled", "SwizzledPanels")):
        left, top = 84 + part * 330, 78
        svg.heading(left, 28, layout)
        step = headers.offset(layout, 0, 64) - headers.offset(layout, 0, 0)
        below = headers.offset(layout, 8, 0) - headers.offset(layout, 0, 0)
        svg.text(left, 46, f"64 columns on: {2 * step:,} bytes; 8 rows on: {2 * below:,}", 11, MUTED)
        svg.text(left, 62, "number: where a row's 128 bytes lie, in lines of 128", 11, MUTED)
        for row in range(8):
            if part == 0:
                svg.text(left - 8, top + row * CELL + 15, f"row {row}", 11, MUTED, "end")
            for half in range(COLS // BANKS):
                line = min(headers.offset(layout, row, col) for col in range(half * BANKS, (half + 1) * BANKS)) // BANKS
                x, y = left + half * 5 * CELL, top + row * CELL
                svg.rect(x, y, 5 * CELL, CELL, COLOURS[half])
                svg.text(x + 2.5 * CELL, y + 15, line, 11, anchor="middle")
    return str(svg)


def quad_columns(headers: DeviceHeaders) -> str:
    """Which of four lanes holds which columns of a row."""
    columns = headers.lists["minimal.column"]
    owner = {column: i // (COLS // QUAD) for i, column in enumerate(columns)}
    svg = Svg("The columns of a row, dealt to four lanes")
    svg.heading(16, 28, f"{COLS} columns of one row of q and o, dealt to the four lanes of a quad")
    svg.text(16, 46, "a square is 8 columns, 16 bytes; the number is the lane that holds them", fill=MUTED)
    for chunk in range(COLS // CHUNK):
        lanes = {owner[chunk * CHUNK + i] for i in range(CHUNK)}
        assert len(lanes) == 1
        lane = lanes.pop()
        svg.cell(16 + chunk * 1.5 * CELL, 62, lane, COLOURS[lane])
        svg.text(16 + chunk * 1.5 * CELL + CELL / 2, 62 + CELL + 14, chunk * CHUNK, 10, MUTED, "middle")
    svg.text(16, 62 + CELL + 34, "at each load the quad reads 64 bytes in a row", 11, MUTED)
    return str(svg)


def accumulator(headers: DeviceHeaders) -> str:
    """Which lane of a warp holds which numbers of a 16 x 8 product."""
    svg = Svg("An mma accumulator in the lanes of a warp")
    svg.heading(16, 28, "C of mma.m16n8k16: 16 x 8 floats, four to a lane")
    svg.text(16, 46, "the number is the lane; each row is in the four lanes of one quad", fill=MUTED)
    left, top = 76, 62
    for lane in range(32):
        row, col = headers.lane("accumulator_row", lane), headers.lane("accumulator_col", lane)
        for i in range(4):
            x, y = left + (col + i % 2) * CELL, top + (row + i // 2 * 8) * CELL
            svg.cell(x, y, lane, COLOURS[lane % QUAD])
    for row in (0, 7, 8, 15):
        svg.text(left - 8, top + row * CELL + 15, f"row {row}", 11, MUTED, "end")
    svg.text(left + 8 * CELL + 12, top + 15, "c[0], c[1]: rows 0 to 7", 11, MUTED)
    svg.text(left + 8 * CELL + 12, top + 8 * CELL + 15, "c[2], c[3]: rows 8 to 15", 11, MUTED)
    return str(svg)


def ldmatrix_lanes(headers: DeviceHeaders) -> str:
    """Which lanes point at the rows of the four 8 x 8 blocks, and which register each block arrives in."""
    svg = Svg("The order of the four blocks of an ldmatrix.x4")
    for part, order in enumerate(("ByColumn", "ByRow")):
        left, top = 30 + part * 300, 100
        svg.heading(left, 28, order)
        svg.text(left, 46, "rows of K, 16 columns of 16 bits", 11, MUTED)
        svg.text(left, 62, "r: register; lanes: who points at the rows", 11, MUTED)
        for half in range(2):
            svg.text(left + (half + 0.5) * 5 * CELL, top - 8, f"k half {half}", 11, MUTED, "middle")
        for row_half in range(2):
            for col_half in range(2):
                register = headers.lists[f"{order}.block"][2 * row_half + col_half]
                lanes = [
                    lane
                    for lane in range(32)
                    if headers.lane(f"{order}.row", lane) // 8 == row_half
                    and headers.lane(f"{order}.col", lane) // 8 == col_half
                ]
                x, y = left + col_half * 5 * CELL, top + row_half * 4 * CELL
                svg.rect(x, y, 5 * CELL, 4 * CELL, COLOURS[register])
                svg.text(x + 2.5 * CELL, y + 40, f"r{register}", 16, anchor="middle", bold=True)
                svg.text(x + 2.5 * CELL, y + 60, f"lanes {lanes[0]} to {lanes[-1]}", 11, anchor="middle")
        pairs = [tuple(headers.lists[f"{order}.block"][2 * n + half] for half in range(2)) for n in range(2)]
        together = all(low + 1 == high and low % 2 == 0 for low, high in pairs)
        words = ", ".join(f"(r{low}, r{high})" for low, high in pairs)
        verdict = "neighbours: no moves" if together else "not neighbours: moves"
        svg.text(left, top + 8 * CELL + 22, f"B operands of 8 rows: {words}", 11)
        svg.text(left, top + 8 * CELL + 38, verdict, 11, GOOD if together else BAD)
    return str(svg)


def copy_map(headers: DeviceHeaders) -> str:
    """Which warp copies which rows of a tile, and which 16-byte pieces are thread 0's."""
    svg = Svg("Which warp copies which rows")
    titles = {"by_warps": "a band of rows each", "by_cta": "rows dealt in turn"}
    for part, (name, words) in enumerate(titles.items()):
        left, top, size = 70 + part * 260, 86, 11
        copies = headers.copies(name)
        own = [copy for copy in copies if copy[0] == 0]
        patterns = sorted({row % 8 for _, row, _, _ in own})
        svg.heading(left, 28, f"{words}: {name}")
        svg.text(left, 46, f"{ROWS} rows of {COLS // CHUNK} pieces; colour: warp of {WARPS}", 11, MUTED)
        svg.text(left, 62, f"outlined: thread 0, {len(own)} copies", 11, MUTED)
        for thread, row, col, _ in copies:
            svg.rect(
                left + col // CHUNK * size, top + row * size / 2, size, size / 2, COLOURS[thread // 32], "#ffffff", 0.5
            )
        for _, row, col, _ in own:
            svg.rect(left + col // CHUNK * size, top + row * size / 2, size, size / 2, "none", INK, 1.5)
        swizzles = f"row % 8 of thread 0: {', '.join(map(str, patterns))}"
        one = len(patterns) == 1
        verdict = "one swizzle" if one else f"{len(patterns)} swizzles"
        svg.text(left, top + ROWS * size / 2 + 20, f"{swizzles}: {verdict}", 11, GOOD if one else BAD)
        if part == 0:
            for row in (0, 16, 32, 48):
                svg.text(left - 8, top + row * size / 2 + 9, f"row {row}", 10, MUTED, "end")
    return str(svg)
