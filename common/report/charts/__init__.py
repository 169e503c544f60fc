"""Charts of what was measured, by matplotlib: each takes data frames. `theme` gives all of them one look."""
