"""moe_permute as tuning knows it: random tokens and experts, what must become of them, and what torch runs for it."""
