"""Modules shaped like SGLang's runners of models and of CUDA graphs: who calls whom, with how many rows.

They have no code of SGLang's. Graphs are lists of how many rows they were captured for.
"""

from __future__ import annotations

import types
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

EXECUTOR = "sglang.srt.model_executor"
RANKS = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": None}


class Output(NamedTuple):
    """What a step gives, of which SGLang's has these among others."""

    rows: int
    can_run_graph: bool


def batch(tokens: int, requests: int | None = None) -> Any:
    """Requests that are decoded, one token of each, or that many of them in prefill."""
    decodes = requests is None
    return types.SimpleNamespace(
        input_ids=torch.zeros(tokens, dtype=torch.int64), batch_size=tokens if decodes else requests, decodes=decodes
    )


def contents() -> dict[str, dict[str, Any]]:
    """Modules by name."""
    runners = _graphs()
    return {
        f"{EXECUTOR}.model_runner": _runner(runners),
        f"{EXECUTOR}.cuda_graph_runner": {"CudaGraphRunner": runners[0]},
        f"{EXECUTOR}.piecewise_cuda_graph_runner": {"PiecewiseCudaGraphRunner": runners[1]},
    }


def _runner(runners: tuple[type, type]) -> dict[str, Any]:
    graph_runner, piecewise_runner = runners

    class ModelRunner:
        def __init__(
            self, server_args: Any, make: Callable[[], nn.Module], is_draft_worker: bool = False, **more: Any
        ) -> None:
            self.server_args, self.is_draft_worker, self._make = server_args, is_draft_worker, make
            self.model_config = types.SimpleNamespace(dtype=torch.bfloat16, model_path="org/some-model")
            vars(self).update({"is_generation": True} | RANKS | more)
            self.logits: Any = None  # what makes logits of the head, or of an embedding that is tied
            self.graph_runner: Any = None
            self.piecewise_cuda_graph_runner: Any = None
            self.load_model()

        def load_model(self) -> None:
            self.model = self._make()  # where layers choose their functions
            for module in self.model.modules():
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)

        def init_device_graphs(self) -> None:
            self.graph_runner, self.piecewise_cuda_graph_runner = graph_runner(self), piecewise_runner(self)

        def run_model(self, rows: int, rows_of_head: int) -> None:
            """As a model's forward, of which the head alone is called."""
            heads = [module for module in self.model.modules() if hasattr(module, "embeds")]
            if self.logits is not None and heads:
                self.logits(torch.zeros(rows_of_head, heads[-1].weight.shape[1]).bfloat16(), heads[-1])

        def step(self, forward_batch: Any) -> Any:
            return self._forward_raw(forward_batch, None, split_forward_count=1)

        def _forward_raw(
            self,
            forward_batch: Any,
            pp_proxy_tensors: Any,
            reinit_attn_backend: bool = False,
            split_forward_count: int = 1,
        ) -> Any:
            graphs = self.graph_runner if forward_batch.decodes else self.piecewise_cuda_graph_runner
            if graphs is not None and graphs.can_run(forward_batch):
                return Output(graphs.replay(forward_batch), True)
            rows = len(forward_batch.input_ids)
            self.run_model(rows, forward_batch.batch_size)
            return Output(rows, False)

    def resolve_language_model(model: Any) -> Any:
        return model.model if hasattr(model, "model") else model.language_model

    return {"ModelRunner": ModelRunner, "resolve_language_model": resolve_language_model}


def _graphs() -> tuple[type, type]:
    class CudaGraphRunner:
        def __init__(self, runner: Any) -> None:
            self.runner, self.capture_bs, self.bs = runner, runner.server_args.cuda_graph_bs, 0
            self.num_tokens_per_bs = runner.server_args.speculative_num_draft_tokens or 1
            self.stale = False  # whether graphs are captured anew before the next replay
            self.capture()

        def capture(self) -> None:
            for bs in self.capture_bs:
                self.runner.run_model(bs * self.num_tokens_per_bs, bs * self.num_tokens_per_bs)

        def can_run(self, forward_batch: Any) -> bool:
            return bool(forward_batch.batch_size <= self.capture_bs[-1])

        def replay(self, forward_batch: Any, pp_proxy_tensors: Any = None) -> int:
            if self.stale:
                self.capture()
            self.bs = self.capture_bs[bisect_left(self.capture_bs, forward_batch.batch_size)]
            return int(self.bs * self.num_tokens_per_bs)

    class PiecewiseCudaGraphRunner:
        def __init__(self, runner: Any) -> None:
            self.runner, self.capture_num_tokens = runner, runner.server_args.piecewise_cuda_graph_tokens

        def can_run(self, forward_batch: Any) -> bool:
            return len(forward_batch.input_ids) <= self.capture_num_tokens[-1]

        def replay_prepare(self, forward_batch: Any, **kwargs: Any) -> Any:
            index = bisect_left(self.capture_num_tokens, len(forward_batch.input_ids))
            return types.SimpleNamespace(input_ids=torch.zeros(self.capture_num_tokens[index]))

        def replay(self, forward_batch: Any, **kwargs: Any) -> int:
            rows = len(self.replay_prepare(forward_batch, **kwargs).input_ids)
            self.runner.run_model(rows, forward_batch.batch_size)
            return rows

    return CudaGraphRunner, PiecewiseCudaGraphRunner
