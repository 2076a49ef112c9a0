"""How tuning spreads rows of grouped GEMMs over groups, and how many it has. Imports no torch."""

from __future__ import annotations

from runtime.grouped_gemm import Signature

# Routers do not load all experts alike: a row falls to a group with a probability that is log-normal, of this sigma.
# With 128 groups the busiest has about four times the mean.
SKEW = 0.5
ROOM = 2  # of masked rows, times as many as there are on average
_EXPERTS_OF_A_TOKEN = 8  # of rows that are gathered, as Qwen3's and DeepSeek-V3's experts take tokens


def rows_read(signature: Signature, m: int) -> int:
    """How many rows of A there are to `m` of D: where these are gathered, tokens that `_EXPERTS_OF_A_TOKEN` take."""
    return -(-m // _EXPERTS_OF_A_TOKEN) if signature.rows == "gathered" else m
