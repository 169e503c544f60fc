"""What of a problem decides which kernel computes it, and how that is compiled. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from flashladder.common.problem.config import Value, spelled

LENGTHS = SHORT, LONG = "short", "long"  # classes of lengths
FEATURES = ("window", "softcap", "alibi", "sinks", "dropout", "mods")  # that few problems have


@dataclass(frozen=True)
class Kind:
    """The problems that one kernel computes, compiled once.

    It has no sizes: no batch, lengths, pages or splits. Of these it has `length`, the class of seqlen_k, and `classes`,
    what the ladder's expressions over sizes come to (versions/decode/ladder.yaml). `options` are those of the
    operation that are flags or configuration fields, by name; `unusual` names the ones that are not at their defaults.
    """

    operation: str
    dtype: str
    head_dim: int  # of Q and K
    head_dim_v: int
    causal: bool = False
    lse: bool = False
    packed: bool = False
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout: bool = False
    mods: str = ""  # a mask and a score that are expressions, as a configuration spells them
    gqa: bool = False  # fewer heads of K and V than of Q
    layout: str = "bshd"
    options: tuple[tuple[str, Value], ...] = ()
    unusual: tuple[str, ...] = ()
    length: str = SHORT
    classes: tuple[tuple[str, Value], ...] = ()

    @property
    def set_options(self) -> dict[str, Value]:
        """The options that are not at their defaults."""
        return {name: value for name, value in self.options if name in self.unusual}

    @property
    def any_size(self) -> str:
        """The kinds of its problems at any size, as winners are named by them: 'dtype=bf16,head_dim=64,causal=true'.

        With the log-sum-exp or without, and with as many heads of K as of Q or fewer: these share a winner.
        """
        columns = {"head_dim": self.head_dim} | ({} if self.is_even else {"head_dim_v": self.head_dim_v})
        features = {name: True for name in FEATURES if getattr(self, name)}
        return spelled({"dtype": self.dtype, **columns, "causal": self.causal, **features, **self.set_options})

    @property
    def is_even(self) -> bool:
        """Whether V has as many columns as Q and K."""
        return self.head_dim_v == self.head_dim

    def decided(self, columns: int) -> dict[str, Value]:
        """The configuration fields that it decides, in a rung that has them; `columns` is the kernel's head_dim."""
        same = {name: getattr(self, name) for name in ("dtype", "head_dim_v", "causal", "lse", "packed", *FEATURES)}
        is_full = columns == self.head_dim == self.head_dim_v
        return {**same, **dict(self.options), "head_dim": columns, "narrower": not is_full}
