"""Choose the fastest correct function for every signature and M of an archive, on the GPUs at hand.

Reads a candidate archive and writes a tuned one; needs torch and GPUs of one of the archive's targets, and no compiler.
Every function is checked before it is timed. Entries for other targets pass through as they are, so that one archive
can be tuned on one machine after the other. `run.tune_archive` is where it begins; it imports no torch, since measuring
is done by processes that do.
"""
