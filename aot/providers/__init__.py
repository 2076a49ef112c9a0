"""Where variants come from, one module for each source of kernels; `aot.search.provider` has their names."""
