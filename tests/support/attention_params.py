"""AttentionParams of common/cuda/params.cuh, as a kernel declares it."""

import itertools

from flashladder.common.compiler.declaration import ParamsField

NUM_BYTES = {"Q": 8, "s": 24, "i": 4, "f": 4}
FORMATS = {
    **dict.fromkeys(("q", "k", "v", "o", "lse"), "Q"),
    **dict.fromkeys(("q_stride", "k_stride", "v_stride", "o_stride"), "s"),
    **dict.fromkeys(("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k"), "i"),
    "softmax_scale": "f",
}
_ends = list(itertools.accumulate(NUM_BYTES[kind] for kind in FORMATS.values()))
FIELDS = tuple(
    ParamsField(name, kind, end - NUM_BYTES[kind]) for (name, kind), end in zip(FORMATS.items(), _ends, strict=True)
)
PARAMS = {"params_bytes": _ends[-1], "fields": FIELDS}
