"""Functions as data: records of their arguments, launch programs and cost programs, and tensors held against these."""
