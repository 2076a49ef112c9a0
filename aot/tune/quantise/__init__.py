"""quantise as tuning knows it: random rows, what must become of them, how exactly, and what torch runs for it."""
