"""The page of `aot report`: plain data in, one self-contained HTML document out. Knows nothing of archives."""
