"""mma.sync that wait to be emitted, and how they are joined.

An mma only reads and writes registers, so it is kept pending until something else reads its result. By then its
neighbours are pending too, and become few large products: mma with the same A stand side by side, chains of mma that
only feed the next one's accumulator become one product along k, and those that share all of B are stacked. So f32 sums
are taken in another order than one mma after the other takes them; what a sum consists of is the same.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class PendingMma:
    """One mma, its operands as Python names: fragments a (4 or 2), b (2 or 1), c and d (4)."""

    index: int
    type: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    c: tuple[str, ...]
    d: tuple[str, ...]


@dataclass(frozen=True)
class _Product:
    """D = C + A B of several mma. `a` names the registers of each block of 16 rows, `b` of each block of 8 columns,
    along k; `c` and `d` name the accumulators of each row block and column block, row by row."""

    type: str
    a: list[tuple[str, ...]]
    b: list[tuple[str, ...]]
    c: list[tuple[str, ...]]
    d: list[tuple[str, ...]]


def _flat(blocks: list[tuple[str, ...]]) -> list[str]:
    return [name for block in blocks for name in block]


def joined(pending: list[PendingMma], needed: set[str], zero: str) -> tuple[list[str], set[str]]:
    """The lines that compute pending mma as few products, and the names of the results that they give.

    Args:
        needed: the names that something else reads; a result that only feeds the next product gets no name.
        zero: the name of zeros, with which a sum may begin.
    """
    lines, computed = list[str](), set[str]()
    for product in _stack_rows(_chain(_side_by_side(pending), needed)):
        a, b, c, d = (_flat(part) for part in (product.a, product.b, product.c, product.d))
        accumulators = "None" if set(c) == {zero} else f"[{', '.join(c)}]"
        result = f"multiply({product.type!r}, {len(product.a)}, [{', '.join(a)}], [{', '.join(b)}], {accumulators})"
        lines.append(f"{', '.join(d)} = {result}")
        computed.update(d)
    return lines, computed


def _side_by_side(pending: list[PendingMma]) -> list[_Product]:
    """Joins mma of one A, unless one needs the result of a later product. Products only need what comes before them."""
    products: list[_Product] = []
    producer: dict[str, int] = {}
    for item in pending:
        first = 1 + max((producer.get(name, -1) for name in item.c), default=-1)
        alike = (n for n in range(first, len(products)) if products[n].a == [item.a] and products[n].type == item.type)
        position = next(alike, len(products))
        if position == len(products):
            products.append(_Product(item.type, [item.a], [], [], []))
        for part, names in zip(("b", "c", "d"), (item.b, item.c, item.d), strict=True):
            getattr(products[position], part).append(names)
        producer.update((name, position) for name in item.d)
    return products


def _chain(products: list[_Product], needed: set[str]) -> list[_Product]:
    """Joins a product with the one whose accumulators it feeds, if nobody else wants its result: longer along k."""
    uses = Counter(name for product in products for name in _flat(product.c))
    chained: list[_Product] = []
    for product in products:
        wanted_once = all(uses[name] == 1 and name not in needed for name in _flat(product.c))
        feeding = [n for n, earlier in enumerate(chained) if earlier.d == product.c and earlier.type == product.type]
        if wanted_once and feeding:
            earlier = chained.pop(feeding[0])
            a = [earlier.a[0] + product.a[0]]
            b = [before + behind for before, behind in zip(earlier.b, product.b, strict=True)]
            product = _Product(product.type, a, b, earlier.c, product.d)
        chained.append(product)
    return chained


def _stack_rows(products: list[_Product]) -> list[_Product]:
    """Joins products with the same B that need no other's result."""
    produced = {name for product in products for name in _flat(product.d)}
    stacked: list[_Product] = []
    for product in products:
        if produced.isdisjoint(_flat(product.c)):
            for n, other in enumerate(stacked):
                if (other.b, other.type) == (product.b, product.type) and produced.isdisjoint(_flat(other.c)):
                    stacked[n] = _Product(
                        other.type, other.a + product.a, other.b, other.c + product.c, other.d + product.d
                    )
                    break
            else:
                stacked.append(product)
        else:
            stacked.append(product)
    return stacked
