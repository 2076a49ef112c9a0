"""Signing an archive: what it holds and came from, as a statement in an envelope; `runtime.signing` checks it."""
