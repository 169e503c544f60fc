"""Finds the rungs and the references in versions/ and knows what each takes, as its version.yaml declares it.

schema      what a version.yaml may say              configurable   the fields of a configuration, and their values
catalogue   rungs and references, and finding them   naming         how rungs are called
ladder      what a ladder.yaml says; kinds           winners        configurations that measured best
launches    which rung runs a kind of problem        limiters       what can keep a kernel from being faster
"""

from flashladder.common.catalog.catalogue import (
    FIRST,
    PTXAS_LEVEL,
    ROW_STRIDE,
    Implementation,
    Reference,
    Version,
    directory_of,
    find,
    find_implementation,
    finished,
    folder_of,
    forget,
    ladders,
    nearest,
    one_operation,
    references,
    rung_names,
    select,
    versions,
)
from flashladder.common.catalog.configurable import Choice
from flashladder.common.catalog.ladder import kind_of, ladder_name, ladder_named, ladder_of
from flashladder.common.catalog.launches import FASTEST, Card, Widths, choice, launched, widths
from flashladder.common.catalog.limiters import LIMITERS
from flashladder.common.catalog.naming import address_of
from flashladder.common.catalog.schema import SmallSm, Supports
from flashladder.common.own import results_of

__all__ = [
    "FASTEST",
    "FIRST",
    "LIMITERS",
    "PTXAS_LEVEL",
    "ROW_STRIDE",
    "Card",
    "Choice",
    "Implementation",
    "Reference",
    "SmallSm",
    "Supports",
    "Version",
    "Widths",
    "address_of",
    "choice",
    "directory_of",
    "find",
    "find_implementation",
    "finished",
    "folder_of",
    "forget",
    "kind_of",
    "ladder_name",
    "ladder_named",
    "ladder_of",
    "ladders",
    "launched",
    "nearest",
    "one_operation",
    "references",
    "results_of",
    "rung_names",
    "select",
    "versions",
    "widths",
]
