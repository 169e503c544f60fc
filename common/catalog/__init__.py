"""Finds the rungs and the references in versions/ and knows what each takes, as its version.yaml declares it.

schema      what a version.yaml may say             choice   the fields of a configuration, and their values
catalogue   rungs and references, and finding them    naming   how rungs are called
limiters   what can keep a kernel from being faster
"""

from flashladder.common.catalog.catalogue import (
    FIRST,
    PTXAS_LEVEL,
    Implementation,
    Reference,
    Version,
    decided_by,
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
from flashladder.common.catalog.choice import Choice
from flashladder.common.catalog.limiters import LIMITERS
from flashladder.common.catalog.naming import address_of
from flashladder.common.catalog.schema import SmallSm, Supports
from flashladder.common.own import results_of

__all__ = [
    "FIRST",
    "LIMITERS",
    "PTXAS_LEVEL",
    "Choice",
    "Implementation",
    "Reference",
    "SmallSm",
    "Supports",
    "Version",
    "address_of",
    "decided_by",
    "find",
    "find_implementation",
    "finished",
    "folder_of",
    "forget",
    "ladders",
    "nearest",
    "one_operation",
    "references",
    "results_of",
    "rung_names",
    "select",
    "versions",
]
