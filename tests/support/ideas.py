"""A ladder of one's own with a rung made from rung 02, and what its author might save."""

import shutil

from flashladder.common import own
from flashladder.common.catalog import find, forget
from flashladder.common.workshop import scaffold

PARENT = "02"
SCALE = "scale(s, params.softmax_scale * log2_e);"
EDITS = {  # of its kernel
    "longer": (SCALE, f"{SCALE}\n        __syncthreads();"),
    "no kernel": (SCALE, SCALE.rstrip(";")),
    "wrong": (SCALE, SCALE.replace("log2_e", "1.4f")),
    "racing": ("__syncthreads();  // K and V are there for every warp", ""),
    "endless": (SCALE, f"{SCALE}\n        while (params.seqlen_q > 0) __syncthreads();"),
    "unchanged": (SCALE, f"{SCALE}  // as it was"),
}


def begin(monkeypatch, folder):
    """The rung mine/00_my_idea in a new folder; in the place of an earlier one, what it saves is compiled already."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    forget()
    monkeypatch.setenv(own.VARIABLE, str(folder))
    return scaffold.make("my_idea", PARENT, private=True)


def save(rung, edit):
    """Saves its kernel: that of the parent, edited."""
    old, new = EDITS[edit]
    text = find(PARENT).kernel.read_text()
    assert old in text
    rung.kernel.write_text(text.replace(old, new))
    forget()
