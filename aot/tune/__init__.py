"""Choose the fastest correct function for every signature and M of an archive, on the GPUs at hand.

Reads a candidate archive and writes a tuned one; needs torch and GPUs of one of the archive's targets, and no compiler.
Every function is checked before it is timed. Entries for other targets pass through as they are, so that one archive
can be tuned on one machine after the other. Imports no torch: measuring is done by processes that do.
"""

from __future__ import annotations

from ..tune_options import TuneError, TuneOptions
from .halving import Measured
from .run import tune_archive
from .write import TuneReport

__all__ = ["Measured", "TuneError", "TuneOptions", "TuneReport", "tune_archive"]
