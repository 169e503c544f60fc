"""The operations of this repository's ladders, a file each: what is computed of which tensors, the exact answer, its
tolerance.

forward    O and the log-sum-exp of Q, K and V       packed   the same of sequences one behind the other
backward   the gradients of Q, K and V
decode     O of few rows against a cache of keys     mla      the same of latents, which are K and V of all heads
"""
