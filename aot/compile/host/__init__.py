"""The host function that the DSL compiles, read as IR, and the launch program that says the same as data."""
