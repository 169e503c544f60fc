"""What a kernel does with scores: a mask, a score, or both, with the tensors that they read. torch calls them mods.

As a configuration's value, which has no spaces and is the same for all texts of one meaning:

    image:int32[];slope:fp32[];mask=k<=q||image[q]==image[k];score=s+slope[h]*(k-q)

A backward pass that gives gradients of tensors has their names too: gradients=bias+slope.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from flashladder.common.errors import ExpressionError
from flashladder.common.expression import parse, ranges, terms, text
from flashladder.common.expression.band import Band, band
from flashladder.common.expression.derivative import ONE, ZERO, derivative
from flashladder.common.expression.tree import (
    DTYPES,
    SCORE,
    Declared,
    Element,
    Name,
    Node,
    Type,
    names,
    walk,
)

CPP_TYPES = {"uint8": "unsigned char", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long"}
CPP_TYPES |= {"bool": "bool", "fp16": "__half", "bf16": "__nv_bfloat16", "fp32": "float", "fp64": "double"}
INCLUDES = ("cuda_bf16.h", "cuda_fp16.h")
MOST_TENSORS, MOST_INDICES, MOST_LETTERS = 8, 4, 20  # of a kernel; of a tensor; of its name
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_S = Name(name=SCORE, type=Type.FLOAT)
_DECLARED = re.compile(r"(\w+):(\w+)((?:\[\])*)")


@dataclass(frozen=True)
class Mods:
    """Trees of a mask and a score, each of which may be missing; `sources` are the texts that their spans are of.

    `gradients` names the tensors whose gradients are asked for.
    """

    mask: Node | None = None
    score: Node | None = None
    gradients: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls, mask: str = "", score: str = "", tensors: Iterable[Declared] = (), gradients: Iterable[str] = ()
    ) -> Mods:
        """Those of two texts, of which an empty one is none. ExpressionError for what they should not be."""
        named = {tensor.name: tensor for tensor in tensors}
        for tensor in named.values():
            _check(tensor)
        found = cls(
            parse.mask(mask, named) if mask else None,
            parse.score(score, named) if score else None,
            tuple(sorted(gradients)),
            {"mask": mask, "score": score},
        )
        if unread := named.keys() - {tensor.name for tensor in found.tensors}:
            raise ExpressionError(f"no expression reads {', '.join(sorted(unread))} of the tensors")
        if len(found.tensors) > MOST_TENSORS:
            raise ExpressionError(f"the expressions read {len(found.tensors)} tensors; kernels take {MOST_TENSORS}")
        if flat := [name for name in found.gradients if name not in found.growing]:
            raise ExpressionError(f"no score grows with {', '.join(flat)}, so there is no gradient")
        return found

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(spelled: str) -> Mods:
        """The inverse of `spelled`, and of `asked`."""
        texts, tensors = {}, []
        for part in filter(None, spelled.split(";")):
            what, equals, tree = part.partition("=")
            if declared := _DECLARED.fullmatch(part):
                tensors.append(Declared(declared[1], declared[2], len(declared[3]) // 2))
            elif equals and what in ("mask", "score", "gradients"):
                texts[what] = tree
            else:
                raise ExpressionError(f"mods={spelled}: {part} is no mask=, no score=, and no tensor, as t:int32[] is")
        gradients = filter(None, texts.get("gradients", "").split("+"))
        return Mods.of(texts.get("mask", ""), texts.get("score", ""), tensors, gradients)

    @cached_property
    def trees(self) -> dict[str, Node]:
        """Those that there are."""
        both = {"mask": self.mask, "score": self.score}
        return {what: tree for what, tree in both.items() if tree is not None}

    @cached_property
    def tensors(self) -> tuple[Declared, ...]:
        """Those that are read, by name."""
        nodes = (node for tree in self.trees.values() for node in walk(tree))
        return tuple(sorted({node.tensor for node in nodes if isinstance(node, Element)}))

    @cached_property
    def elements(self) -> tuple[Element, ...]:
        """Those of tensors of floats that the score reads."""
        found = walk(self.score) if self.score is not None else ()
        return tuple({node: None for node in found if isinstance(node, Element) and node.type == Type.FLOAT})

    @cached_property
    def growing(self) -> tuple[str, ...]:
        """The tensors that the score has a derivative by."""
        if self.score is None:
            return ()
        return tuple(sorted({each.tensor.name for each in self.elements if derivative(self.score, each) != ZERO}))

    @cached_property
    def has_slope(self) -> bool:
        """Whether the score may grow by more or less than s does."""
        return self.score is not None and derivative(self.score, _S) != ONE

    @cached_property
    def window_apart(self) -> tuple[Band, str] | None:
        """The window that the mask is, and what is `asked` for beside it; None of any other mask, or none."""
        seen = band(self.mask) if self.mask is not None else None
        return (seen, replace(self, mask=None).asked) if seen else None

    @cached_property
    def spelled(self) -> str:
        """As a configuration has it; empty where it does nothing."""
        return self._joined({what: text.normal(tree) for what, tree in self.trees.items()})

    @cached_property
    def asked(self) -> str:
        """The same with the texts as they were given, which errors show. Configurations never have it."""
        return self._joined({what: self.sources[what] for what in self.trees})

    def _joined(self, texts: Mapping[str, str]) -> str:
        declared = (f"{tensor.name}:{tensor.dtype}{'[]' * tensor.rank}" for tensor in self.tensors)
        asked = {"gradients": "+".join(self.gradients)} if self.gradients else {}
        return ";".join([*declared, *(f"{what}={each}" for what, each in {**texts, **asked}.items())])

    def header(self) -> list[str]:
        """What kernels are compiled from, as lines of C++ in the namespace `config`."""
        mask, score = (text.c(tree) if tree else default for tree, default in ((self.mask, "true"), (self.score, "s")))
        read, of_score = (names(tree) if tree else set() for tree in (self.mask, self.score))
        within = ranges.c(self.mask) if self.mask else "ranges::truth(true)"
        what, given = "template <class Params>\n    __device__ static", text.GIVEN
        return [
            f"constexpr bool has_mask = {str(self.mask is not None).lower()};",
            f"constexpr bool has_score = {str(self.score is not None).lower()};",
            *(f"constexpr bool mask_names_{name} = {str(name in read).lower()};" for name in ("b", "h")),
            f"constexpr bool score_names_b = {str('b' in of_score).lower()};",
            f"constexpr bool has_slope = {str(self.has_slope).lower()};",
            f"constexpr bool has_gradients = {str(bool(self.gradients)).lower()};",
            *self._params(),
            "struct Mods {",
            f"    {what} bool mask({given}) {{ return {mask}; }}",
            *(f"    {line}" for line in terms.header(self.mask)),
            f"    {what} Maybe mask_within({given}, Range q, Range k) {{ return {within}; }}",
            f"    {what} float score({given}, float s) {{ return {score}; }}",
            *(f"    {line}" for line in self._derivatives(given)),
            "};",
        ]

    def _derivatives(self, given: str) -> Iterator[str]:
        """What backward passes call: the slope of the score over s, and over each element that has a gradient.

        `visit` is told of an element which one it is of those that all scores of a head share, or -1; where its
        gradient is summed, the number of the element in it, how many there are, and the slope.
        """
        if self.score is None:
            return
        yield "template <class Params>"
        yield f"__device__ static float slope({given}, float s) {{ return {text.c(derivative(self.score, _S))}; }}"
        wanted = [each for each in self.elements if each.tensor.name in self.gradients]
        shared = [each for each in wanted if not names(each) & {"q", "k"}]
        yield f"static constexpr int num_shared = {len(shared)};"
        yield "template <class Params, class Visit>"
        yield f"__device__ static void each_slope({given}, float s, Visit visit) {{"
        for each in wanted:
            number, tensor = shared.index(each) if each in shared else -1, each.tensor
            place = f"params.{tensor.gradient}, {text.offset(each)}, params.{tensor.count}"
            yield f"    visit({number}, {place}, {text.c(derivative(self.score, each))});"
        yield "}"
        yield "template <class Params, class Visit>"
        yield "__device__ static void each_gradient(const Params &params, Visit visit) {"
        for tensor in self._asked_for:
            yield f"    visit(params.{tensor.gradient}, params.{tensor.count});"
        yield "}"

    @property
    def _asked_for(self) -> Iterator[Declared]:
        return (tensor for tensor in self.tensors if tensor.name in self.gradients)

    def _params(self) -> Iterator[str]:
        """Those of a kernel with the tensors, and with their sizes but for the first."""
        yield "template <class Params>"
        if not self.tensors:
            yield "using Reading = Params;"
            return
        fields = {tensor.field: f"const {CPP_TYPES[tensor.dtype]} *" for tensor in self.tensors}
        fields |= {tensor.gradient: "float *" for tensor in self._asked_for}
        fields |= {tensor.count: "long long " for tensor in self._asked_for}
        fields |= {extent: "int " for extent, _, _ in self.extents()}
        yield "struct Reading : Params {"
        yield from (f"    {kind}{name};" for name, kind in fields.items())
        yield f"    FLASHLADDER_FURTHER_FIELDS(Params, {', '.join(fields)})"
        yield "};"

    def extents(self) -> Iterator[tuple[str, int, int]]:
        """The name of each size that kernels are told, with the number of its tensor and that of its dimension."""
        for number, tensor in enumerate(self.tensors):
            for dimension in range(1, tensor.rank):
                yield tensor.extent(dimension), number, dimension


def _check(tensor: Declared) -> None:
    """ExpressionError for what no expression can name."""
    name = tensor.name
    if not _NAME.fullmatch(name) or len(name) > MOST_LETTERS:
        raise ExpressionError(f"{name!r} is no name of a tensor: letters, digits and _, up to {MOST_LETTERS} of them")
    if name in parse.RESERVED:
        raise ExpressionError(f"{name} has a meaning in every expression; give the tensor another name")
    if tensor.dtype not in DTYPES:
        raise ExpressionError(f"{name} is {tensor.dtype}; expressions read {', '.join(DTYPES)}")
    if tensor.rank > MOST_INDICES:
        raise ExpressionError(f"{name} has {tensor.rank} dimensions; expressions take up to {MOST_INDICES}")
