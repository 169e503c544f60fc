"""The helpers that the generated code names."""

from typing import Any

import numpy as np

from . import arithmetic, fragments
from .arrays import ALL_LANES, narrow
from .barrier import BarrierCall
from .bulk import BytesOperand, TileOperand
from .cluster_barrier import ClusterCall
from .mbarrier import MbarrierCall
from .register_pool import RegisterCall
from .warpgroup import WaitCall, warpgroup_of

VOCABULARY: dict[str, Any] = {
    **{name: getattr(arithmetic, name) for name in arithmetic.__all__},
    **{name: getattr(fragments, name) for name in fragments.__all__},
    **{call.__name__: call for call in (BarrierCall, ClusterCall, MbarrierCall, RegisterCall, WaitCall)},
    "BytesOperand": BytesOperand,
    "TileOperand": TileOperand,
    "warpgroup_of": warpgroup_of,
    "narrow": narrow,
    "all_lanes": ALL_LANES.astype(np.uint32)[None],
}
