"""The built-in operations, a file each: what is computed of which tensors, the exact answer, its tolerance.

forward   O and the log-sum-exp of Q, K and V        packed   the same of sequences one behind the other
"""
