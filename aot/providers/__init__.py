"""Where variants come from, one module for each source of kernels; `aot.search.provider` has their names.

A provider is a class as `aot.search.provider.Provider` describes it, and its `aot.search.variants.Family` objects.
`variants` and `functions` are one line each, by `aot.search.legal.legal_variants` and `legal_functions`. A module here
imports no compiler before `build` is called.

From a family follow its variants' names, keys and legality, their cache keys, the oracle's sample, tuning and packing;
and their place in the order, by `estimate_us` where the family has one, else behind families that do, though the best
of each family is compiled in any case. So it is for GEMMs: nothing orders the variants of other operations, unless the
operation says what does (`aot.search.operation.Building.shortlist`).
"""
