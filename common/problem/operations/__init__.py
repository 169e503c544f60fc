"""What a problem may ask for, each with its tensors, its exact answer and its tolerance.

operation   what all of them say of themselves             forward   O and the log-sum-exp of Q, K and V
packed      the same of sequences one behind the other    alibi     both with a slope for each head
"""

from flashladder.common.problem.operations.alibi import BIASED
from flashladder.common.problem.operations.forward import FORWARD
from flashladder.common.problem.operations.operation import Operation
from flashladder.common.problem.operations.packed import PACKED

__all__ = ["BIASED", "OPERATIONS", "Operation"]

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (FORWARD, PACKED)}
