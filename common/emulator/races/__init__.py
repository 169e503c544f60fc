"""Watches what is executed, and finds accesses that nothing orders."""
