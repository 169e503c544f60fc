"""A mask_mod or a score_mod of torch's flex_attention as the text of an expression, traced by torch.fx.

The function is called once, with tensors that have no values. Each of torch's operations on them becomes a part of the
text; tensors from outside are read where they lie. What has no such part is refused, by the operation's name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from flashladder.common.errors import UnsupportedProblemError

ROW = "(q - (seqlen_k - seqlen_q))"  # rows count from 0 in torch, however many keys come before the first
PLACES = ("b", "h", ROW, "k")
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITS = {"and": ("&&", "&"), "or": ("||", "|"), "xor": ("!=", "^")}  # of truth values, of whole numbers
_SAME = {"abs": "abs", "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt", "tanh": "tanh"}
_SAME |= {"sin": "sin", "cos": "cos", "floor": "floor", "ceil": "ceil", "minimum": "min", "maximum": "max"}
_VIEWS = ("select", "slice", "view", "unsqueeze", "squeeze", "expand", "permute", "transpose")
_FILLED = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}  # by which argument says
_ONES, _ZEROS = ("ones", "new_ones", "ones_like"), ("zeros", "new_zeros", "zeros_like")
_COPIES = ("clone", "lift_fresh", "lift_fresh_copy", "alias", "detach")


@dataclass(frozen=True)
class Traced:
    """The text of an expression, and the tensors that it reads, by the names that it has for them."""

    text: str
    tensors: dict[str, torch.Tensor]


def trace(what: str, function: Callable[..., Any], device: torch.device, with_score: bool, prefix: str) -> Traced:
    """What a function of (b, h, q_idx, kv_idx), or of a score and these, computes; `prefix` begins tensors' names.

    UnsupportedProblemError where it does what no expression can say.
    """
    zeros = [torch.zeros((), dtype=torch.int32, device=device) for _ in PLACES]
    if with_score:
        zeros.insert(0, torch.zeros((), device=device))

    def indexed(*places: torch.Tensor) -> torch.Tensor:
        with _Indexing():
            found = function(*places)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedProblemError(f"{what} gives {found!r}, no tensor: it should depend on its arguments")
        return found

    try:
        graph = make_fx(indexed, tracing_mode="fake", _allow_non_fake_inputs=True)(*zeros)
    except (RuntimeError, TypeError, IndexError) as error:  # torch's errors of what a trace cannot follow
        said = next(iter(str(error).splitlines()), "")
        raise UnsupportedProblemError(
            f"{what} cannot be traced: {said}. It may use tensors' operators, torch.where in place of `if`, and & | ~ "
            "in place of `and`, `or`, `not`"
        ) from error
    return _Writer(what, graph, [*(["s"] if with_score else []), *PLACES], prefix).written()


class _Indexing(TorchFunctionMode):
    """An index that is a tensor stays one: torch would ask a tensor without dimensions for its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            base, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(each, torch.Tensor) and each.dtype != torch.bool for each in indices):
                if not all(isinstance(each, (int, torch.Tensor)) for each in indices):
                    raise TypeError(f"an index such as {index}: it takes numbers alone")
                wanted = [torch.scalar_tensor(x, dtype=torch.int64) if isinstance(x, int) else x for x in indices]
                return torch.ops.aten.index(base, wanted)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Element:
    """A tensor from outside with some of its indices."""

    tensor: torch.Tensor
    indices: tuple[str, ...] = ()


class _Writer:
    def __init__(self, what: str, graph: GraphModule, places: list[str], prefix: str) -> None:
        self._what, self._graph, self._prefix = what, graph, prefix
        self._places = iter(places)
        self._known: dict[Node, str | _Element] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def written(self) -> Traced:
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                self._known[node] = next(self._places)
            elif node.op == "get_attr":
                self._known[node] = _Element(operator.attrgetter(node.target)(self._graph))
            elif node.op == "output":
                (result,) = node.args
                return Traced(self._text(result[0] if isinstance(result, (list, tuple)) else result), self._tensors)
            else:
                self._known[node] = self._called(node)
        raise AssertionError("a graph has an output")

    def _refuse(self, node: Node, why: str = "no expression has it") -> UnsupportedProblemError:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        return UnsupportedProblemError(f"{self._what} uses {name} of torch: {why}")

    def _called(self, node: Node) -> str | _Element:
        name = (
            node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else str(node.target)
        )
        first = node.args[0] if node.args else None
        if (
            name in (*_COPIES, *_VIEWS)
            and isinstance(first, Node)
            and isinstance(known := self._known[first], _Element)
        ):
            return self._seen(node, name, known)
        if name == "index":
            return self._indexed(node)
        if node.meta["val"].numel() != 1:
            raise self._refuse(node, f"it gives {node.meta['val'].numel()} values, where an expression has one")
        if name in (*_COPIES, *_VIEWS):
            return self._text(first)
        if name in (*_FILLED, *_ONES, *_ZEROS):
            value = node.args[_FILLED[name]] if name in _FILLED else int(name in _ONES)
            return _number(bool(value) if self._is(node, "truth") else value)
        write = getattr(self, f"write_{name.strip('_')}", None)
        if name in _COMPARED:
            return self._compared(_COMPARED[name], *node.args)
        if name in _SAME:
            return f"{_SAME[name]}({', '.join(map(self._text, node.args))})"
        for kind in ("bitwise", "logical"):
            if (bits := _BITS.get(name.removeprefix(f"{kind}_").strip("_"))) and len(node.args) == 2:
                return self._of_bits(bits, kind == "logical", *node.args)
        if write is None or set(node.kwargs) - {"rounding_mode", "dtype", "layout", "device", "pin_memory"}:
            raise self._refuse(node)
        return str(write(node, *node.args, **node.kwargs))

    # -- values

    def _text(self, value: Any) -> str:
        if not isinstance(value, Node):
            return _number(value)
        known = self._known[value]
        if isinstance(known, str):
            return known
        tensor, indices = known.tensor, known.indices
        if len(indices) < tensor.dim() and tensor.numel() == 1:
            indices = ("0",) * tensor.dim()
        if len(indices) != tensor.dim():
            raise UnsupportedProblemError(
                f"{self._what} reads {len(indices)} of the {tensor.dim()} indices of a tensor {tuple(tensor.shape)}: "
                "an expression has one element of it"
            )
        names = [name for name, each in self._tensors.items() if each is tensor]
        name = names[0] if names else f"{self._prefix}{len(self._tensors)}"
        self._tensors[name] = tensor
        return name + "".join(f"[{index}]" for index in indices)

    def _is(self, value: Any, *kinds: str) -> bool:
        dtype = (
            value.meta["val"].dtype
            if isinstance(value, Node)
            else {bool: torch.bool, int: torch.int64}.get(type(value))
        )
        kind = "truth" if dtype == torch.bool else "float" if dtype is None or dtype.is_floating_point else "whole"
        return kind in kinds

    def _truth(self, value: Any) -> str:
        return self._text(value) if self._is(value, "truth") else f"({self._text(value)} != 0)"

    def _value(self, value: Any) -> str:
        """A number; 1 of what is true."""
        return f"({self._text(value)} ? 1 : 0)" if self._is(value, "truth") else self._text(value)

    def _is_positive(self, value: Any) -> bool:
        """Whether it is surely not below 0: then rounding down is rounding to 0."""
        if not isinstance(value, Node):
            return bool(value >= 0)
        if value.op == "placeholder":
            return self._is(value, "whole")
        name = getattr(getattr(value.target, "overloadpacket", None), "__name__", "")
        return name in ("add", "mul", "floor_divide", "remainder") and all(map(self._is_positive, value.args))

    def _seen(self, node: Node, name: str, known: _Element) -> _Element:
        """A part of a tensor from outside, or all of it, where it lies."""
        if name in _COPIES:
            return known
        if not known.indices:
            return _Element(node.target(known.tensor, *node.args[1:], **node.kwargs))  # type: ignore[operator]
        match name, node.args[1:]:
            case "select", (0, int(index)) if index >= 0:
                return _Element(known.tensor, (*known.indices, str(index)))
        raise self._refuse(node, "what has some of its indices takes no more than further ones")

    # -- operations, by torch's names

    def _indexed(self, node: Node) -> _Element:
        base: Any
        indices: Any
        base, indices = node.args
        known = self._known[base]
        are_numbers = all(isinstance(each, Node) and each.meta["val"].dim() == 0 for each in indices)
        if isinstance(known, str) or not are_numbers:
            raise self._refuse(node, "what is indexed is no tensor from outside, or an index is no number")
        return _Element(known.tensor, (*known.indices, *map(self._text, indices)))

    def _compared(self, sign: str, left: Any, right: Any) -> str:
        both_true = self._is(left, "truth") and self._is(right, "truth") and sign in ("==", "!=")
        show = self._text if both_true else self._value
        return f"({show(left)} {sign} {show(right)})"

    def _of_bits(self, signs: tuple[str, str], is_logical: bool, left: Any, right: Any) -> str:
        if is_logical or (self._is(left, "truth") and self._is(right, "truth")):
            return f"({self._truth(left)} {signs[0]} {self._truth(right)})"
        return f"({self._value(left)} {signs[1]} {self._value(right)})"

    def _arithmetic(self, sign: str, node: Node, left: Any, right: Any) -> str:
        if node.meta["val"].dtype == torch.bool:
            return self._of_bits((sign, sign), False, left, right)
        return f"({self._value(left)} {sign} {self._value(right)})"

    def write_add(self, node: Node, left: Any, right: Any) -> str:
        return self._arithmetic("||" if node.meta["val"].dtype == torch.bool else "+", node, left, right)

    def write_mul(self, node: Node, left: Any, right: Any) -> str:
        return self._arithmetic("&&" if node.meta["val"].dtype == torch.bool else "*", node, left, right)

    def write_sub(self, node: Node, left: Any, right: Any) -> str:
        return self._arithmetic("-", node, left, right)

    def write_rsub(self, node: Node, left: Any, right: Any) -> str:
        return self._arithmetic("-", node, right, left)

    def write_neg(self, node: Node, x: Any) -> str:
        return f"(-{self._value(x)})"

    def write_div(self, node: Node, left: Any, right: Any, rounding_mode: str | None = None) -> str:
        if rounding_mode == "floor":
            return self.write_floor_divide(node, left, right)
        if rounding_mode == "trunc":
            if not self._is(node, "whole"):
                raise self._refuse(node, "of floats no expression rounds to 0")
            return f"({self._value(left)} / {self._value(right)})"
        return f"(float({self._value(left)}) / {self._value(right)})"

    def write_floor_divide(self, node: Node, left: Any, right: Any) -> str:
        a, b = self._value(left), self._value(right)
        if not self._is(node, "whole"):
            return f"floor({a} / {b})"
        if self._is_positive(left) and self._is_positive(right):
            return f"({a} / {b})"
        return f"(({a} - ({a} % {b} + {b}) % {b}) / {b})"

    def write_remainder(self, node: Node, left: Any, right: Any) -> str:
        a, b = self._value(left), self._value(right)
        if not self._is(node, "whole"):
            return f"({a} - floor({a} / {b}) * {b})"
        is_simple = self._is_positive(left) and self._is_positive(right)
        return f"({a} % {b})" if is_simple else f"(({a} % {b} + {b}) % {b})"

    def write_fmod(self, node: Node, left: Any, right: Any) -> str:
        if not self._is(node, "whole"):
            raise self._refuse(node)
        return f"({self._value(left)} % {self._value(right)})"

    def write_pow(self, node: Node, base: Any, exponent: Any) -> str:
        if not isinstance(base, Node) and base == 2:
            return f"exp2({self._value(exponent)})"
        if exponent in (2, 3):
            return f"({' * '.join([self._value(base)] * exponent)})"
        if exponent == 0.5:
            return f"sqrt({self._value(base)})"
        raise self._refuse(node, "an expression has squares, cubes, roots and powers of 2: write exp2(y * log2(x))")

    def write_where(self, node: Node, condition: Any, yes: Any, no: Any) -> str:
        show = self._text if self._is(node, "truth") else self._value
        return f"({self._truth(condition)} ? {show(yes)} : {show(no)})"

    def write_bitwise_not(self, node: Node, x: Any) -> str:
        return f"(!{self._text(x)})" if self._is(x, "truth") else f"(~{self._text(x)})"

    def write_logical_not(self, node: Node, x: Any) -> str:
        return f"(!{self._truth(x)})"

    def write_clamp(self, node: Node, x: Any, low: Any = None, high: Any = None) -> str:
        text = self._value(x)
        text = text if low is None else f"max({text}, {self._value(low)})"
        return text if high is None else f"min({text}, {self._value(high)})"

    def write_sigmoid(self, node: Node, x: Any) -> str:
        return f"(1 / (1 + exp(-{self._value(x)})))"

    def write_rsqrt(self, node: Node, x: Any) -> str:
        return f"(1 / sqrt({self._value(x)}))"

    def write_reciprocal(self, node: Node, x: Any) -> str:
        return f"(1.0 / {self._value(x)})"

    def write_relu(self, node: Node, x: Any) -> str:
        return f"max({self._value(x)}, 0)"

    def write_to_copy(self, node: Node, x: Any, **_: Any) -> str:
        if self._is(node, "truth"):
            return self._truth(x)
        if self._is(node, "float"):
            return f"float({self._value(x)})"
        return f"int({self._value(x)})" if self._is(x, "float") else self._value(x)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isnan(value):
        raise UnsupportedProblemError("NaN is no number of an expression")
    return f"({value!r})" if value < 0 else repr(value)
