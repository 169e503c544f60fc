"""Instructions to basic blocks, and each block to a Python function on numpy arrays."""
