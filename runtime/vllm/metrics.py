"""A library's figures in vLLM's /metrics: written now and then to where its server looks for those of its processes.

A worker is another process than the server. `prometheus_client`, which vLLM has, carries figures from one to the other
in files, where the environment variable `PROMETHEUS_MULTIPROC_DIR` names a folder for both. Nothing is counted here.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..serve.stats import Metric, Stats, metrics

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def wanted() -> bool:
    """Whether the server asks its processes for figures."""
    return bool(os.environ.get(FOLDER))


class Exporter:
    """The figures of one worker, told from others by `labels`. Raises ImportError where there is no prometheus_client.

    What a library counted is added to the process's counters, so a second one in the process goes on from the first.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._client = importlib.import_module("prometheus_client")
        self._made: dict[str, Any] = {}
        self._added: dict[tuple[Any, ...], float] = {}  # to each counter, by name and labels

    def update(self, stats: Stats) -> None:
        """Write what a library counted."""
        for metric in metrics(stats):
            for labels, value in metric.samples:
                all_labels = self._labels | labels
                one = self._of(metric, tuple(all_labels)).labels(**all_labels)
                if metric.kind == "counter":
                    key = metric.name, *all_labels.values()
                    one.inc(value - self._added.get(key, 0))
                    self._added[key] = value
                else:
                    one.set(value)

    def _of(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        if metric.name not in self._made:
            options: dict[str, Any] = {"labelnames": labels, "registry": None}
            if metric.kind == "gauge":  # no two workers have the same labels; the last of a rank counts
                self._made[metric.name] = self._client.Gauge(
                    metric.name, metric.what, multiprocess_mode="mostrecent", **options
                )
            else:
                self._made[metric.name] = self._client.Counter(metric.name, metric.what, **options)
        return self._made[metric.name]
