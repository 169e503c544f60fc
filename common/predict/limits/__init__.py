"""What keeps a kernel from being faster, and which rung's idea is against it.

diagnosis   what was found: limits, their source lines, ideas     kinds    which instruction belongs to which limit
predicted   without a GPU: the loop simulated without each        sampled  where warps were found, by Nsight Compute
"""

from flashladder.common.predict.limits.diagnosis import Diagnosis, Limit
from flashladder.common.predict.limits.predicted import predict
from flashladder.common.predict.limits.sampled import sample

__all__ = ["Diagnosis", "Limit", "predict", "sample"]
