"""FlashLadder: a laboratory for attention kernels. See README.md."""
