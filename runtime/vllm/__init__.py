"""A plugin of vLLM's that lets an archive compute linear layers, the head, and experts, in 16, 8 and 4 bits.

vLLM calls `register` in each of its processes, by the entry point `cute_aot` of the group `vllm.general_plugins`.
It does nothing until an engine's `additional_config` names an archive. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from .plugin import register

__all__ = ["register"]
