"""What a problem may ask for, each with its tensors, its exact answer and its tolerance.

operation   what all of them say of themselves             forward   O and the log-sum-exp of Q, K and V
"""

from flashladder.common.operations.forward import FORWARD
from flashladder.common.operations.operation import Operation

__all__ = ["OPERATIONS", "Operation"]

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (FORWARD,)}
