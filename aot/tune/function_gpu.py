"""The backend that checks functions of a spec on a GPU: needs torch, and runs in a process of its own
(`aot.tune.worker`)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.errors import DeviceError
from runtime.serve.library import Library

from ..providers import spec_file
from . import function_check, halving, measure
from .worker import Announce, Setup


class FunctionBackend:
    """Checks functions of an archive against the references of a spec, whose path is the setup's `details`."""

    careful = False

    def __init__(self, setup: Setup, announce: Announce) -> None:
        self._announce, self._seed = announce, setup.options.seed
        self._environment = measure.environment()
        self._spec = spec_file.load(Path(setup.details), lasting=True)
        archive = Archive.open(setup.archive)
        self._functions = {
            name: f for t in archive.targets for name, f in function_check.names_of(self._spec.functions, t).items()
        }
        self._library = Library(archive, Driver())

    def environment(self) -> dict[str, Any]:
        """The machine and the versions behind a check."""
        return self._environment

    def check(self, signature: Any, m: int, names: Sequence[str]) -> dict[str, str]:
        """The functions that are wrong at the case of number `m`, with what is wrong; there is no signature."""
        found = {}
        for name in names:
            self._announce(name, m)

            def launch(*arguments: Any, name: str = name) -> None:
                try:
                    self._library.functions[name](*arguments, stream=torch.cuda.current_stream())
                except DeviceError:
                    torch.cuda.synchronize()  # raises where the context is of no more use
                    raise

            if wrong := function_check.check(self._spec, self._functions[name], m, launch, self._seed):
                found[name] = wrong
        return found

    def bench(self, signature: Any, m: int) -> contextlib.AbstractContextManager[halving.Bench]:
        """Nothing is timed."""
        raise NotImplementedError
