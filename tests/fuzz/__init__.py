"""Fuzzers that are led by what an input reaches: `native.py` of native code, `readers.py` of readers in Python."""
