"""A library's figures in a server's /metrics: written now and then to where it looks for those of its processes.

A worker is another process than the server. `prometheus_client`, which servers have, carries figures from one to the
other in files, where the environment variable `PROMETHEUS_MULTIPROC_DIR` names a folder for both. Nothing is counted
here.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from ..serve.library import Library
from ..serve.stats import Metric, Stats, metrics
from .log import own_name, words
from .periodic import Periodic

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


class Exporting:
    """The figures of the library that serves this process now, while its server asks for them."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._writing: Periodic | None = None

    def begin(self, lib: Library | None, engine_and_rank: Callable[[], tuple[int, int]]) -> None:
        """Show what `lib` counts, if there is one, as that of a rank of an engine; whatever is in the way of that is
        one line of the log."""
        if lib is None or not wanted():
            return
        try:
            engine, rank = engine_and_rank()
            exporter = Exporter({"engine": str(engine), "rank": str(rank)})
        except Exception as error:  # no prometheus_client, or another release of it
            self._log.warning("%s has no metrics: %s", own_name(lib), words(error))
        else:
            self._writing = Periodic(lambda: exporter.update(lib.stats()), self._log, "writes no metrics")

    def end(self) -> None:
        """Write the figures a last time: another library takes over, or none."""
        if self._writing is not None:
            self._writing.stop()
        self._writing = None
