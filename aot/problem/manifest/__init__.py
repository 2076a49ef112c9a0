"""Manifests: the YAML files that say which problems a model has. `reader` reads them strictly and says what they hold,
`manifest` has that as data, and `writer` writes it back readably.

Every mistake is a `ManifestError` that names the file, the line, the field and the fix.
"""

from .manifest import (
    MAX_COUNT,
    MAX_EXTENT,
    MAX_TOKENS,
    Gemm,
    Manifest,
    ManifestError,
    Problem,
    Use,
    use,
)
from .nodes import read_text
from .reader import lists_gemms, load, loads
from .rules import signature_problem
from .writer import digest, dump, write

__all__ = [
    "MAX_COUNT",
    "MAX_EXTENT",
    "MAX_TOKENS",
    "Gemm",
    "Manifest",
    "ManifestError",
    "Problem",
    "Use",
    "digest",
    "dump",
    "lists_gemms",
    "load",
    "loads",
    "read_text",
    "signature_problem",
    "use",
    "write",
]
