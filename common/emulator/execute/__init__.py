"""Runs the functions of the blocks: CTAs, warps, memories, and what these wait for."""
