"""A mask_mod or a score_mod of torch's flex_attention as the text of an expression, traced by torch.fx.

The function is called once, with tensors that have no values. Each of torch's operations on them becomes a part of a
tree; tensors from outside are read where they lie. What has no such part is refused, by the operation's name.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashladder.common.api.expressions import MOST_LETTERS
from flashladder.common.api.frontends.flex_tree import (
    PLACES,
    ROW,
    SCORE,
    call,
    choice,
    floored,
    floored_rest,
    joined,
    most,
    number,
    signed,
    truth_of,
    value_of,
)
from flashladder.common.errors import ExpressionError, UnsupportedProblemError
from flashladder.common.expression import Declared, Type, normal, parse
from flashladder.common.expression.evaluate import TORCH_DTYPES
from flashladder.common.expression.tree import DTYPES, Element, depth_of
from flashladder.common.expression.tree import Node as Tree

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITS = {"and": ("&&", "&"), "or": ("||", "|"), "xor": ("!=", "^")}  # of truth values, of whole numbers
_TWO = {"add": ("||", partial(joined, "+")), "mul": ("&&", partial(joined, "*"))}  # of truth values, of numbers
_TWO |= {"maximum": ("||", partial(call, "max")), "minimum": ("&&", partial(call, "min"))}
_SAME = ("abs", "exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos")
_VIEWS = ("select", "slice", "view", "unsqueeze", "squeeze", "expand", "permute", "transpose")
_FILLED = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}  # by which argument says
_ONES, _ZEROS = ("ones", "new_ones", "ones_like"), ("zeros", "new_zeros", "zeros_like")
_LIFTED = ("lift_fresh", "lift_fresh_copy")  # of what the function itself makes of numbers
_COPIES = ("clone", "alias", "detach", *_LIFTED)
_COPIED_OUT = ("tolist", "numpy", "__array__")  # values that no operation gives
_GROWING = ("add", "sub", "rsub", "mul", "pow")  # leave 32 bits where torch has 64
_tracing = threading.RLock()  # make_fx changes what all threads share


@dataclass(frozen=True)
class Traced:
    """The text of an expression, and the tensors that it reads, by the names that it has for them."""

    text: str
    tensors: dict[str, torch.Tensor]


def trace(
    what: str, function: Callable[..., Any], device: torch.device, with_score: bool, prefix: str, row: Tree = ROW
) -> Traced:
    """What a function of (b, h, q_idx, kv_idx), or of a score and these, computes; `prefix` begins tensors' names.

    `row` is what q_idx is: ROW counts from 0, POSITION from the sequence's first key.

    UnsupportedProblemError where it does what no expression can say.
    """
    if not callable(function):
        raise UnsupportedProblemError(f"{what} is {function!r}; it should be a function of tensors")
    b, h, _, k = PLACES
    places = [b, h, row, k]
    zeros = [torch.zeros((), dtype=torch.int32, device=device) for _ in places]
    if with_score:
        zeros.insert(0, torch.zeros((), device=device))

    def indexed(*given: torch.Tensor) -> torch.Tensor:
        with _Valueless(), _Indexing():
            found = function(*given)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedProblemError(f"{what} gives {found!r}, no tensor: it should depend on its arguments")
        return found

    try:
        with _tracing:
            graph = make_fx(indexed, tracing_mode="fake", _allow_non_fake_inputs=True)(*zeros)
    except (RuntimeError, TypeError, IndexError) as error:  # torch's errors of what a trace cannot follow
        said = next(iter(str(error).splitlines()), "")
        raise UnsupportedProblemError(
            f"{what} cannot be traced: {said}. It may use tensors' operators, torch.where in place of `if`, and & | ~ "
            "in place of `and`, `or`, `not`"
        ) from error
    return _Writer(what, graph, [*([SCORE] if with_score else []), *places], prefix, device).written()


class _Valueless(TorchDispatchMode):
    """No tensor gives its value: the text would keep it, whatever the tensor holds later."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise TypeError("it asks a tensor for its value, as item(), int(), bool() and equal() do")
        return func(*args, **(kwargs or {}))


class _Indexing(TorchFunctionMode):
    """An index that is a tensor stays one: torch would ask a tensor without dimensions for its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _COPIED_OUT:
            raise TypeError(f"it asks a tensor for its values by {func.__name__}")
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
class _Read:
    """A tensor from outside with some of its indices."""

    tensor: torch.Tensor
    indices: tuple[Tree, ...] = ()


class _Writer:
    def __init__(self, what: str, graph: GraphModule, places: list[Tree], prefix: str, device: torch.device) -> None:
        self._what, self._graph, self._prefix, self._device = what, graph, prefix, device
        self._places = iter(places)
        self._known: dict[Node, Tree | _Read] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._bases: dict[Any, Node] = {}  # by what shares its memory
        self._viewed: set[Node] = set()

    def written(self) -> Traced:
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                self._known[node] = next(self._places)
            elif node.op == "get_attr":
                self._known[node] = _Read(operator.attrgetter(node.target)(self._graph))
            elif node.op == "output":
                (result,) = node.args
                tree = self._tree(result[0] if isinstance(result, (list, tuple)) else result)
                return Traced(normal(tree), self._tensors)
            else:
                try:
                    self._known[node] = self._called(node)
                except ExpressionError as error:
                    raise self._refuse(node, str(error)) from None
        raise AssertionError("a graph has an output")

    def _refuse(self, node: Node, why: str = "no expression has it") -> UnsupportedProblemError:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        return UnsupportedProblemError(f"{self._what} uses {name} of torch: {why}")

    def _called(self, node: Node) -> Tree | _Read:
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta["val"], torch.Tensor):
            raise self._refuse(node)
        name = node.target.overloadpacket.__name__
        first = node.args[0] if node.args else None
        known = self._known[first] if isinstance(first, Node) else None
        self._check_memory(node, first)
        if isinstance(known, _Read) and name in (*_COPIES, *_VIEWS):
            return self._seen(node, name, known)
        if name == "index":
            return self._indexed(node)
        if node.meta["val"].numel() != 1:
            raise self._refuse(node, f"it gives {node.meta['val'].numel()} values, where an expression has one")
        tree = self._fitted(node, name.strip("_"), self._computed(node, name, first))
        if depth_of(tree) > parse.MOST_DEPTH or len(normal(tree)) > MOST_LETTERS:
            raise self._refuse(
                node,
                f"up to here more than {parse.MOST_DEPTH} operations wait for each other, or the text has more than "
                f"{MOST_LETTERS:,} letters: use a tensor",
            )
        return tree

    def _computed(self, node: Node, name: str, first: Any) -> Tree:
        if name in (*_COPIES, *_VIEWS):
            if node.meta["val"].dtype != first.meta["val"].dtype:
                raise self._refuse(node, "no expression reads bits as another type")
            return self._tree(first)
        if name in (*_FILLED, *_ONES, *_ZEROS):
            value: Any = node.args[_FILLED[name]] if name in _FILLED else int(name in _ONES)
            dtype = node.meta["val"].dtype
            return number((bool if dtype == torch.bool else float if dtype.is_floating_point else int)(value))
        name = name.strip("_")
        if name in _COMPARED:
            return self._compared(_COMPARED[name], *map(self._tree, node.args))
        if name in _SAME:
            return call(name, *map(self._number, node.args))
        for kind in ("bitwise", "logical"):
            if (bits := _BITS.get(name.removeprefix(f"{kind}_").strip("_"))) and len(node.args) == 2:
                return self._of_bits(bits, kind == "logical", *map(self._tree, node.args))
        if name in _TWO and not node.kwargs:
            return self._of_two(node, *_TWO[name])
        write = getattr(self, f"write_{name}", None)
        if write is None or set(node.kwargs) - {"rounding_mode", "dtype", "layout", "device", "pin_memory"}:
            raise self._refuse(node)
        tree: Tree = write(node, *node.args, **node.kwargs)
        return tree

    def _fitted(self, node: Node, name: str, tree: Tree) -> Tree:
        """What is of torch's type, if the tree is not yet: it is refused where this has other values."""
        dtype = node.meta["val"].dtype
        if dtype == torch.bool and tree.type == Type.BOOL:
            return tree
        if dtype.is_floating_point:
            return tree if tree.type == Type.FLOAT else call("float", value_of(tree))
        if dtype not in (torch.int32, torch.int64) or tree.type == Type.FLOAT:
            raise self._refuse(
                node, f"it gives {dtype}; an expression has int32, float32, and int64 of tensors: cast before"
            )
        tree = value_of(tree)
        if dtype == torch.int32 and tree.type == Type.LONG:
            raise self._refuse(node, "it gives int32 of a number with more than 32 bits")
        if dtype == torch.int64 and tree.type == Type.INT and name in _GROWING and most(tree) >= 2**31:
            raise self._refuse(
                node, "it may leave 32 bits, and 64 has only what is read from int64 tensors: leave out the int64 cast"
            )
        return tree

    def _check_memory(self, node: Node, first: Any) -> None:
        """What changes a tensor changes no other, nor one from outside."""
        schema = node.target._schema  # type: ignore[union-attr]
        shares = any(each.alias_info for each in schema.returns)
        base = self._bases[node] = self._bases.get(first, first) if shares else node
        if schema.is_mutable and (base in self._viewed or isinstance(self._known.get(first), _Read)):
            raise self._refuse(node, "it changes a tensor that has a view, or one from outside")
        if shares and not schema.is_mutable:
            self._viewed.add(base)

    # -- values

    def _tree(self, value: Any) -> Tree:
        if not isinstance(value, Node):
            return number(value)
        known = self._known[value]
        if not isinstance(known, _Read):
            return known
        tensor, indices = known.tensor, known.indices
        if tensor.device.type != self._device.type:
            raise UnsupportedProblemError(
                f"{self._what} reads a tensor {tuple(tensor.shape)} on {tensor.device}: it should lie on {self._device}"
            )
        if tensor.dtype not in _NAMES:
            raise UnsupportedProblemError(
                f"{self._what} reads {tensor.dtype}; expressions read {', '.join(TORCH_DTYPES)}"
            )
        if len(indices) < tensor.dim() and tensor.numel() == 1:
            indices = (number(0),) * tensor.dim()
        if len(indices) != tensor.dim():
            raise UnsupportedProblemError(
                f"{self._what} reads {len(indices)} of the {tensor.dim()} indices of a tensor {tuple(tensor.shape)}: "
                "an expression has one element of it"
            )
        names = [name for name, each in self._tensors.items() if each is tensor]
        name = names[0] if names else f"{self._prefix}{len(self._tensors)}"
        self._tensors[name] = tensor
        declared = Declared(name, _NAMES[tensor.dtype], tensor.dim())
        return Element(tensor=declared, indices=indices, type=DTYPES[declared.dtype])

    def _number(self, value: Any) -> Tree:
        return value_of(self._tree(value))

    def _seen(self, node: Node, name: str, known: _Read) -> Tree | _Read:
        """A part of a tensor from outside, or all of it, where it lies; a number that the function makes is one."""
        if name in _LIFTED and known.tensor.numel() == 1:
            return number(known.tensor.item())
        if name in _COPIES:
            return known
        if not known.indices:
            return _Read(node.target(known.tensor, *node.args[1:], **node.kwargs))  # type: ignore[operator]
        match name, node.args[1:]:
            case "select", (0, int(index)) if index >= 0:
                return _Read(known.tensor, (*known.indices, number(index)))
        raise self._refuse(node, "what has some of its indices takes no more than further ones")

    # -- operations, by torch's names

    def _indexed(self, node: Node) -> _Read:
        base: Any
        indices: Any
        base, indices = node.args
        known = self._known[base]
        are_numbers = all(isinstance(each, Node) and each.meta["val"].dim() == 0 for each in indices)
        if not isinstance(known, _Read) or not are_numbers:
            raise self._refuse(node, "what is indexed is no tensor from outside, or an index is no number")
        return _Read(known.tensor, (*known.indices, *map(self._tree, indices)))

    def _compared(self, sign: str, left: Tree, right: Tree) -> Tree:
        both_true = left.type == right.type == Type.BOOL and sign in ("==", "!=")
        return joined(sign, left, right) if both_true else joined(sign, value_of(left), value_of(right))

    def _of_bits(self, signs: tuple[str, str], is_logical: bool, left: Tree, right: Tree) -> Tree:
        if is_logical or left.type == right.type == Type.BOOL:
            return joined(signs[0], truth_of(left), truth_of(right))
        return joined(signs[1], value_of(left), value_of(right))

    def _of_two(self, node: Node, of_truths: str, join: Callable[..., Tree]) -> Tree:
        if node.meta["val"].dtype == torch.bool:
            return joined(of_truths, *map(self._tree, node.args))
        return join(*map(self._number, node.args))

    def write_sub(self, node: Node, left: Any, right: Any) -> Tree:
        return joined("-", self._number(left), self._number(right))

    def write_rsub(self, node: Node, left: Any, right: Any) -> Tree:
        return self.write_sub(node, right, left)

    def write_neg(self, node: Node, x: Any) -> Tree:
        return signed("-", self._number(x))

    def write_div(self, node: Node, left: Any, right: Any, rounding_mode: str | None = None) -> Tree:
        if rounding_mode == "floor":
            return self.write_floor_divide(node, left, right)
        a, b = self._number(left), self._number(right)
        if rounding_mode is None:
            return joined("/", call("float", a), b)
        if not (a.type.is_whole and b.type.is_whole):
            raise self._refuse(node, "of floats no expression rounds to 0")
        return joined("/", a, b)

    def write_floor_divide(self, node: Node, left: Any, right: Any) -> Tree:
        return floored(self._number(left), self._number(right))

    def write_remainder(self, node: Node, left: Any, right: Any) -> Tree:
        return floored_rest(self._number(left), self._number(right))

    def write_fmod(self, node: Node, left: Any, right: Any) -> Tree:
        return joined("%", self._number(left), self._number(right))

    def write_pow(self, node: Node, base: Any, exponent: Any) -> Tree:
        is_float = node.meta["val"].dtype.is_floating_point
        if not isinstance(base, Node) and base == 2:
            x = self._number(exponent)
            if is_float:
                return call("exp2", x)
            fits = joined("&&", joined(">=", x, number(0)), joined("<", x, number(32)))
            return choice(fits, joined("<<", number(1), x), number(0))
        if exponent in (2, 3):
            x = self._number(base)
            return joined("*", *[call("float", x) if is_float and x.type.is_whole else x] * int(exponent))
        if exponent == 0.5:
            return call("sqrt", self._number(base))
        raise self._refuse(node, "an expression has squares, cubes, roots and powers of 2: write exp2(y * log2(x))")

    def write_where(self, node: Node, condition: Any, yes: Any, no: Any) -> Tree:
        show = self._tree if node.meta["val"].dtype == torch.bool else self._number
        return choice(truth_of(self._tree(condition)), show(yes), show(no))

    def write_bitwise_not(self, node: Node, x: Any) -> Tree:
        tree = self._tree(x)
        return signed("!" if tree.type == Type.BOOL else "~", tree)

    def write_logical_not(self, node: Node, x: Any) -> Tree:
        return signed("!", truth_of(self._tree(x)))

    def write_clamp(self, node: Node, x: Any, low: Any = None, high: Any = None) -> Tree:
        tree = self._number(x)
        tree = tree if low is None else call("max", tree, self._number(low))
        return tree if high is None else call("min", tree, self._number(high))

    def write_floor(self, node: Node, x: Any, function: str = "floor") -> Tree:
        tree = self._number(x)
        return tree if tree.type.is_whole else call(function, tree)

    def write_ceil(self, node: Node, x: Any) -> Tree:
        return self.write_floor(node, x, "ceil")

    def write_sigmoid(self, node: Node, x: Any) -> Tree:
        e = call("exp", signed("-", self._number(x)))
        return joined("/", number(1), joined("+", number(1), e))

    def write_rsqrt(self, node: Node, x: Any) -> Tree:
        return joined("/", number(1), call("sqrt", self._number(x)))

    def write_reciprocal(self, node: Node, x: Any) -> Tree:
        return joined("/", number(1.0), self._number(x))

    def write_relu(self, node: Node, x: Any) -> Tree:
        return call("max", self._number(x), number(0))

    def write_to_copy(self, node: Node, x: Any, **_: Any) -> Tree:
        dtype, tree = node.meta["val"].dtype, self._tree(x)
        if dtype == torch.bool:
            return truth_of(tree)
        if dtype.is_floating_point:
            if dtype not in (torch.float32, torch.float64):
                raise self._refuse(node, f"it rounds to {dtype}, and an expression has float32")
            return call("float", value_of(tree))
        is_int = tree.type < Type.LONG or (tree.type, dtype) == (Type.LONG, torch.int64)
        return value_of(tree) if is_int else call("int", tree)
