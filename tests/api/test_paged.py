"""flash_attn_varlen_func over pages: a kernel reads them as they lie, and the host reads nothing."""

import itertools
import re

import pytest
import torch

import flashladder
from flashladder.common.api import caches, paged
from flashladder.common.errors import UnsupportedProblemError
from flashladder.tests.support import fake_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, KEYS, PAGE, HEADS, HEADS_K, COLUMNS = (0, 20, 20, 23, 24), (70, 9, 33, 64), 16, 4, 2, 64
PAGES = 5  # of a sequence at most
NUM_PAGES = PAGES * len(KEYS) + 1


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def drawn(*shape, device="cpu", dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def side_by_side(device):
    return torch.full((NUM_PAGES, 2, PAGE, HEADS_K, COLUMNS), torch.nan, device=device).bfloat16().unbind(1)


def heads_before_keys(device):
    return (
        torch.full((2, NUM_PAGES, HEADS_K, PAGE, COLUMNS), torch.nan, device=device).bfloat16().transpose(2, 3).unbind()
    )


def columns_side_by_side(device):
    return torch.full((NUM_PAGES, PAGE, HEADS_K, 2 * COLUMNS), torch.nan, device=device).bfloat16().split(COLUMNS, -1)


def filled(layout, device):
    """Pages of a layout, in random order, NaN where no key lies; the table, and the same keys one behind the other."""
    k, v = layout(device)
    table = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1))[:-1].view(-1, PAGES).to(device)
    keys, values = drawn(2, sum(KEYS), HEADS_K, COLUMNS, device=device)
    ends = [0, *itertools.accumulate(KEYS)]
    for sequence, (first, last) in enumerate(itertools.pairwise(ends)):
        places = torch.arange(last - first, device=device)
        where = table[sequence, places // PAGE], places % PAGE
        k[where], v[where] = keys[first:last], values[first:last]
    return (k, v), table, (keys, values), int32(ends, device)


def call(layout=side_by_side, device="cpu", **options):
    """O, and its log-sum-exp, of pages and of keys that lie together."""
    pages, table, together, ends = filled(layout, device)
    q, rows, longest = drawn(ROWS[-1], HEADS, COLUMNS, device=device), int32(ROWS, device), (20, 70)
    options = {"causal": True, "return_attn_probs": True, **options}
    found = flashladder.flash_attn_varlen_func(
        q, *pages, rows, None, *longest, block_table=table.int(), seqused_k=ends.diff(), **options
    )
    options.pop("out", None)
    return found[:2], flashladder.flash_attn_varlen_func(q, *together, rows, ends, *longest, **options)[:2]


def require_close(found, expected):
    for x, wanted, most in zip(found, expected, (0.03, 1e-3), strict=True):
        assert x.isfinite().equal(wanted.isfinite())
        torch.testing.assert_close(x, wanted, rtol=0, atol=most)


@pytest.mark.parametrize("layout", [side_by_side, heads_before_keys, columns_side_by_side])
def test_pages_are_read_as_they_lie(layout, device):
    require_close(*call(layout, device))


OPTIONS = {
    "a window": {"window_size": (20, 0)},
    "a window to both sides": {"causal": False, "window_size": (9, 3)},
    "a softcap and a scale": {"softcap": 5.0, "softmax_scale": 0.3},
    "sinks": {"s_aux": drawn(HEADS)},
    "ALiBi": {"alibi_slopes": drawn(HEADS, dtype=torch.float32).abs()},
    "no mask": {"causal": False},
}


@pytest.mark.parametrize(
    "options",
    [pytest.param(each, marks=[] if name == "sinks" else pytest.mark.slow, id=name) for name, each in OPTIONS.items()],
)
def test_options(options, device):
    on_device = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    require_close(*call(device=device, **on_device))


SCALES = {
    "a number": 0.5,
    "of heads": 2.0 ** (torch.arange(len(KEYS) * HEADS_K) % 3 - 2.0).view(-1, HEADS_K),
    "of pages": 2.0 ** (torch.arange(NUM_PAGES * HEADS_K) % 4 - 3).view(-1, 1, HEADS_K, 1),
}


@pytest.mark.parametrize("kind", [pytest.param(x, marks=pytest.mark.slow if "number" in x else []) for x in SCALES])
def test_pages_in_8_bits(kind, device):
    """As pages in 16 bits of the same numbers. What lies behind the keys is NaN."""
    given = SCALES[kind].to(device) if isinstance(SCALES[kind], torch.Tensor) else SCALES[kind]
    pages, table, *_ = filled(side_by_side, device)
    narrow = [x.to(torch.float8_e4m3fn) for x in pages]
    units = torch.ones(NUM_PAGES, 1, HEADS_K, 1, device=device)
    if kind == "of heads":
        units[table] = given[:, None, None, :, None]
    else:
        units[:] = given
    wide = [(x.float() * units).bfloat16() for x in narrow]
    q, rows, keys = drawn(ROWS[-1], HEADS, COLUMNS, device=device), int32(ROWS, device), int32(KEYS, device)
    options = {"block_table": table.int(), "seqused_k": keys, "causal": True, "return_attn_probs": True}
    options |= {"window_size": (40, 0), "softmax_scale": 0.05}
    scales = {"k_descale": given, "v_descale": given}
    found, expected = (
        flashladder.flash_attn_varlen_func(q, *both, rows, None, 20, 70, **options, **its_scales)[:2]
        for both, its_scales in ((narrow, scales), (wide, {}))
    )
    require_close(found, expected)


def test_o_goes_to_memory_of_the_callers(device):
    """Of any strides; what lies between stays."""
    memory = torch.full((ROWS[-1], HEADS, 2 * COLUMNS), 7.0, device=device).bfloat16()
    out = memory[..., :COLUMNS]
    found, expected = call(device=device, out=out)
    assert found[0].data_ptr() == out.data_ptr()
    require_close((out, found[1]), expected)
    assert (memory[..., COLUMNS:] == 7).all()


def test_numbers_may_be_of_64_bits_and_garbage_behind_the_keys(device):
    pages, table, _, ends = filled(side_by_side, device)
    q, rows = drawn(ROWS[-1], HEADS, COLUMNS, device=device), int32(ROWS, device)
    options = {"causal": True, "max_seqlen_q": 20, "max_seqlen_k": 70, "return_attn_probs": True}
    expected = flashladder.flash_attn_varlen_func(q, *pages, rows, ends, block_table=table.int(), **options)
    for sequence, keys in enumerate(KEYS):
        table[sequence, -(-keys // PAGE) :] = (-1, 2**31 - 1, -77, 10**6)[sequence]
    for lengths in ({"cu_seqlens_k": ends.long()}, {"cu_seqlens_k": None, "seqused_k": ends.long().diff()}):
        for starts, its_table in ((rows.long(), table), (rows, table.int())):
            given = {"cu_seqlens_q": starts, "block_table": its_table, **lengths}
            for found, wanted in zip(
                flashladder.flash_attn_varlen_func(q, *pages, **given, **options), expected, strict=True
            ):
                assert torch.equal(found, wanted)


@pytest.mark.parametrize("of_v", [pytest.param(80, marks=pytest.mark.slow), 40])
def test_other_columns_than_a_kernel_has(of_v, device):
    q, ends = drawn(5, 2, 80, device=device), int32((0, 5), device)
    pages = [drawn(3, PAGE, 1, columns, device=device) for columns in (80, of_v)]
    table = int32([[2, 0]], device)
    found = flashladder.flash_attn_varlen_func(q, *pages, ends, int32((0, 30), device), 5, 30, block_table=table)
    together = (x[[2, 0]].flatten(0, 1)[:30] for x in pages)
    expected = flashladder.flash_attn_varlen_func(q, *together, ends, int32((0, 30), device), 5, 30)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("into", [False, True])
def test_the_first_rows_of_each_sequence_alone(into, device):
    """As packed without the others, which see no key."""
    pages, table, _, ends = filled(side_by_side, device)
    used, out = (13, 0, 2, 1), torch.full((ROWS[-1], HEADS, COLUMNS), 7.0, device=device).bfloat16() if into else None
    kept = torch.tensor([*range(13), 20, 21, 23], device=device)
    q, options = drawn(ROWS[-1], HEADS, COLUMNS, device=device), {"causal": True, "return_attn_probs": True}
    options |= {"block_table": table.int(), "seqused_k": ends.diff()}
    given = int32(ROWS, device), None, 20, 70
    for dtype in (torch.int32, torch.int64):
        o, lse, _ = flashladder.flash_attn_varlen_func(
            q, *pages, *given, seqused_q=torch.tensor(used, dtype=dtype, device=device), out=out, **options
        )
        assert not into or o.data_ptr() == out.data_ptr()
        starts = int32([0, *itertools.accumulate(used)], device)
        expected = flashladder.flash_attn_varlen_func(q[kept], *pages, starts, *given[1:], **options)
        require_close((o[kept], lse[:, kept]), expected[:2])
        others = [row for row in range(ROWS[-1]) if row not in kept]
        assert not o[others].any()
        assert (lse[:, others] == -torch.inf).all()


def test_empty_ones():
    q, pages, none = drawn(3, HEADS, COLUMNS), drawn(2, 2, PAGE, HEADS_K, COLUMNS), int32((0,))
    for rows, ends, table in (
        (q, none, torch.zeros(0, 2)),
        (q, int32((0, 3)), torch.zeros(1, 0)),
        (q[:0], int32((0, 0)), torch.zeros(1, 2)),
    ):
        lengths = torch.zeros(len(ends) - 1).int()
        o, lse, _ = flashladder.flash_attn_varlen_func(
            rows, *pages, ends, None, 3, 0, block_table=table.int(), seqused_k=lengths, return_attn_probs=True
        )
        assert (o.shape, lse.shape) == (rows.shape, (HEADS, len(rows)))
        assert not o.any()
        assert (lse == -torch.inf).all()


REFUSED = {
    "block_table is (1,) torch.int32": {"block_table": int32((0,))},
    "block_table is (1, 1) torch.int16": {"block_table": torch.zeros(1, 1, dtype=torch.int16)},
    "block_table has pages 3 to 3; the cache has 3": {"block_table": int32([[3]])},
    "block_table has pages -1 to -1; the cache has 3": {"block_table": int32([[-1]])},
    "max_seqlen_k=17: block_table has room for 16 keys a sequence": {"max_seqlen_k": 17},
    "neither seqused_k nor cu_seqlens_k is given": {"cu_seqlens_k": None},
    "seqused_k=[17]: the cache has room for 0 to 16": {"seqused_k": int32((17,))},
    "seqused_k is (2,) torch.int32": {"seqused_k": int32((3, 4))},
    "cu_seqlens_q is of 1 sequences, cu_seqlens_k of 2": {"cu_seqlens_k": int32((0, 2, 4))},
    "cu_seqlens_q ends with 5; q has 4 rows": {"cu_seqlens_q": int32((0, 5)), "max_seqlen_q": 5},
    "dropout_p=0.5 with a block_table": {"dropout_p": 0.5},
    "out is (4, 1, 32) torch.bfloat16 on cpu; O is (4, 1, 64)": {"out": drawn(4, 1, 32)},
    "s_aux is (2,)": {"s_aux": drawn(2)},
    "q has shape (1, 4, 1, 64)": {"q": drawn(1, 4, 1, 64)},
    "v_cache has shape (3, 8, 1, 64)": {"v": drawn(3, 8, 1, 64)},
    "k_cache has strides": {"k": drawn(3, 16, 1, 68)[..., :64]},
    "seqused_q=[5]: max_seqlen_q allows 0 to 4": {"seqused_q": int32((5,))},
    "seqused_q is (2,) torch.int32": {"seqused_q": int32((1, 1))},
    "seqused_q is given, but no block_table": {"block_table": None, "seqused_q": int32((4,))},
    "seqused_k is given, but no block_table": {"block_table": None, "seqused_k": int32((4,))},
    "k_descale is given, but no block_table": {"block_table": None, "k_descale": 0.5},
    "v_descale is given, but k_cache is torch.bfloat16": {"v_descale": 0.5},
    "num_splits=3 with a block_table": {"num_splits": 3},
    "num_splits is given, but no block_table": {"block_table": None, "num_splits": 1},
    "out is given, but no block_table": {"block_table": None, "out": drawn(4, 1, 64)},
    "cu_seqlens_k is None, but no block_table is given": {"block_table": None, "cu_seqlens_k": None},
}


@pytest.mark.parametrize(("words", "values"), REFUSED.items(), ids=REFUSED)
def test_what_is_wrong_is_refused_by_name(words, values):
    k, v = drawn(2, 3, 16, 1, 64)
    given = {"q": drawn(4, 1, 64), "k": k, "v": v, "cu_seqlens_q": int32((0, 4)), "cu_seqlens_k": int32((0, 4))}
    given |= {"max_seqlen_q": 4, "max_seqlen_k": 16, "block_table": int32([[0]])}
    with pytest.raises(UnsupportedProblemError, match=re.escape(words)):
        flashladder.flash_attn_varlen_func(**given | values)


def test_gradients_are_refused():
    q = drawn(4, 1, 64).requires_grad_()
    with pytest.raises(UnsupportedProblemError, match="want a gradient"):
        flashladder.flash_attn_varlen_func(
            q, *drawn(2, 3, 16, 1, 64), int32((0, 4)), int32((0, 4)), 4, 16, block_table=int32([[0]])
        )


@pytest.fixture
def unread(monkeypatch):
    """CPU tensors are taken for ones on a GPU, whose numbers nobody may ask for."""
    driver = fake_cuda.for_attention(monkeypatch)
    for module in (caches, paged):
        monkeypatch.setattr(module, "can_look_at", lambda tensor: False)
    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"the host read a tensor: {name}"))
    return driver


def test_the_host_reads_nothing(unread):
    """Also of what means nothing, which it would refuse."""
    q, pages = drawn(9, HEADS, COLUMNS), drawn(2, 3, PAGE, HEADS_K, COLUMNS)
    for dtype in (torch.int32, torch.int64):
        starts, table = torch.full((3,), 77, dtype=dtype), torch.full((2, 4), -5, dtype=dtype)
        for lengths in ((starts, None), (None, torch.full((2,), 10**6, dtype=dtype))):
            flashladder.flash_attn_varlen_func(
                q, *pages, starts, lengths[0], 9, 64, block_table=table, seqused_k=lengths[1], causal=True
            )
    fp8 = [x.to(torch.float8_e4m3fn) for x in pages]
    lengths, scale = torch.full((2,), 10**6), torch.full((1,), torch.nan)
    flashladder.flash_attn_varlen_func(
        q, *fp8, starts, None, 9, 64, block_table=table, seqused_k=lengths, k_descale=scale, v_descale=2.0
    )
    flashladder.flash_attn_varlen_func(
        q, *pages, starts, None, 9, 64, block_table=table, seqused_q=lengths, seqused_k=lengths, causal=True
    )
    assert len(unread.launches) == 6


@pytest.mark.gpu
def test_a_gpu_never_waits_and_a_graph_serves_other_lengths():
    """Captured once, with a step's room; replayed with other rows, lengths and tables."""
    pages, table, together, ends = filled(side_by_side, "cuda")
    q, room = drawn(ROWS[-1], HEADS, COLUMNS, device="cuda"), {"max_seqlen_q": 24, "max_seqlen_k": PAGES * PAGE}
    rows, lengths, its_table = (
        int32((0, 1, 2, 3, 4), "cuda"),
        int32((1, 1, 1, 1), "cuda"),
        torch.zeros_like(table).int(),
    )
    out, options = torch.empty_like(q), {"causal": True, "return_attn_probs": True}

    def step():
        return flashladder.flash_attn_varlen_func(
            q, *pages, rows, None, block_table=its_table, seqused_k=lengths, out=out, **room, **options
        )

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        graph = torch.cuda.CUDAGraph()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        _, lse, _ = step()
    for cut in (0, 3):
        rows.copy_(int32(ROWS)), lengths.copy_(ends.diff() - cut), its_table.copy_(table)
        graph.replay()
        kept = torch.cat([torch.arange(a, b - cut) for a, b in itertools.pairwise(ends.tolist())]).cuda()
        its_ends = int32([0, *itertools.accumulate(keys - cut for keys in KEYS)], "cuda")
        expected = flashladder.flash_attn_varlen_func(
            q, *(x[kept] for x in together), int32(ROWS, "cuda"), its_ends, **room, **options
        )
        require_close((out, lse), expected[:2])


@pytest.mark.gpu
def test_a_graph_serves_other_numbers_of_rows():
    pages, table, _, ends = filled(side_by_side, "cuda")
    q, used = drawn(ROWS[-1], HEADS, COLUMNS, device="cuda"), int32((1, 0, 2, 1), "cuda")
    given = int32(ROWS, "cuda"), None, 20, 70
    options = {"causal": True, "block_table": table.int(), "seqused_k": ends.diff()}

    def step():
        return flashladder.flash_attn_varlen_func(q, *pages, *given, seqused_q=used, **options)

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for rows in ((20, 0, 3, 1), (5, 0, 0, 0), (0, 0, 0, 0)):
        used.copy_(int32(rows))
        graph.replay()
        assert torch.equal(found, step())


@pytest.mark.gpu
def test_a_graph_cuts_long_keys_as_their_lengths_suggest():
    """Captured with short ones; against keys that are not cut. A step leaves nothing to the next one."""
    room = 8192
    pages = drawn(2, 5 * room // 64, 64, HEADS_K, COLUMNS, device="cuda")
    table = torch.randperm(5 * room // 64).view(5, -1).int().cuda()
    options = {"block_table": table, "causal": True, "return_attn_probs": True}
    q, starts, lengths = drawn(30, HEADS, COLUMNS, device="cuda"), int32(range(6), "cuda"), int32([1] * 5, "cuda")

    def step(num_splits=0):
        return flashladder.flash_attn_varlen_func(
            q, *pages, starts, None, 30, room, seqused_k=lengths, num_splits=num_splits, **options
        )[:2]

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for rows, keys in (
        ((0, 1, 2, 3, 4, 5), (8192, 1, 0, 700, 4096)),
        ((0, 4, 8, 12, 16, 20), (8192,) * 5),
        ((0, 25, 26, 27, 28, 30), (300, 8000, 5, 77, 2000)),
        ((0, 1, 2, 3, 4, 5), (9, 8, 7, 6, 8192)),
    ):
        starts.copy_(int32(rows)), lengths.copy_(int32(keys))
        for _ in range(2):
            graph.replay()
            require_close(found, step(num_splits=1))


@pytest.mark.gpu
def test_pages_beyond_2_31_elements():
    """The last page of a pool of 9 GB."""
    shape = (2**32 // (PAGE * COLUMNS) + 9, PAGE, 1, COLUMNS)
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    pages, far = torch.empty(shape, dtype=torch.bfloat16, device="cuda"), shape[0] - 1
    few = drawn(2, PAGE, 1, COLUMNS, device="cuda")
    pages[[far, far - 1]] = few
    q, ends = drawn(5, 2, COLUMNS, device="cuda"), int32((0, 5), "cuda")
    given = q, ends, int32((0, 30), "cuda"), 5, 30
    found, expected = (
        flashladder.flash_attn_varlen_func(given[0], x, x, *given[1:], block_table=int32([table], "cuda"), causal=True)
        for x, table in ((pages, (far, far - 1)), (few, (0, 1)))
    )
    assert torch.equal(found, expected)
