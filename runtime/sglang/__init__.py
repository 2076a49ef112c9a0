"""A plugin of SGLang's that lets an archive compute a model's linear layers, in 16 bits or fp8, and its head.

SGLang calls `register` once in each process that loads plugins, by the entry point `cute_aot` of the group
`sglang.srt.plugins`. It does nothing until `--json-model-override-args` names an archive, or a folder to record in.
Imports neither SGLang nor torch.
"""

from __future__ import annotations

from .plugin import register

__all__ = ["register"]
