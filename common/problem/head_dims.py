"""The head_dims that kernels are compiled for, and which of them computes another.

A kernel computes `HEAD_DIMS` columns. A tensor may have fewer: zeros take the place of the others, and O's are not
written.
"""

HEAD_DIMS = (64, 96, 128, 192, 256, 512)
CACHED_HEAD_DIMS = (64, 96, 128, 256)  # those that rows of Q against a cache may have
HEAD_DIM_STEP = 8  # 16 bytes of 16-bit elements: copies move so much at once


def padded_head_dim(head_dim: int) -> int:
    """The next of HEAD_DIMS; the head_dim itself where it is no multiple of HEAD_DIM_STEP, or too wide."""
    if head_dim % HEAD_DIM_STEP:
        return head_dim
    return next((columns for columns in HEAD_DIMS if head_dim <= columns), head_dim)
