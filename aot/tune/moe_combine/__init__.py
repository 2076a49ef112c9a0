"""moe_combine as tuning knows it: random rows, positions and weights, their sums, and what torch runs for it."""
