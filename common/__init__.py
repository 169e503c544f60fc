"""What every rung and tool shares: one way from a version and a config to a verified, measured result."""
