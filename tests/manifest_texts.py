"""A manifest in text for tests, changes of it, and what must be refused where."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot.problem.manifest import ManifestError, loads

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "manifests").glob("*.yaml"))

GOOD = """\
format: 1
model: tiny
source: made up
layers: 2
tokens: [1, 16]
targets: [sm_90a, sm_80]
defaults:
  dtypes: {a: bf16, b: bf16, d: bf16}
gemms:
  - {name: qkv, n: 96, k: 64}
  - name: lm_head
    n: 1000
    k: 64
    per: model
    tokens: [1]
"""

BF16 = ("bf16", "bf16", "bf16", "f32", "none")


def refused(text: str, where: str, *words: str) -> None:
    """`text` is refused in one line that begins with `where`, after the path, and holds the words."""
    with pytest.raises(ManifestError) as caught:
        loads(text, "m.yaml")
    message = str(caught.value)
    assert message.startswith(f"m.yaml:{where}"), message
    assert "\n" not in message
    for word in words:
        assert word in message


def edited(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)
