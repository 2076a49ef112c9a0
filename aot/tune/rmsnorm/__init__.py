"""RMSNorm as tuning knows it: random operands, the reference, its tolerance, and what torch runs in its place."""
