"""A worker that is recorded: from its settings to the file, which `runtime.plugin.record` has.

Plugins derive from `Recording` and say when a model is loaded and when steps run. Serves nothing, and leaves all that
the server computes as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from .log import own_name, words
from .periodic import Periodic
from .record import Recorder, Worker

Capability = tuple[int, int] | None


class Recording:
    """That of the worker that was made last in this process, if its server asks for one."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._recorder: Recorder | None = None
        self._writing: Periodic | None = None

    def _begin(self, folder: str, worker: Callable[[], Worker], install: Callable[[], None]) -> None:
        """Record the worker that `worker` describes in `folder`, and `install` what sees it run; where one of these
        raises, nothing is recorded."""
        try:
            self._recorder = Recorder(folder, worker())
            install()
        except Exception as error:  # whatever another release of the server raises
            self._give_up(error)

    def end(self) -> None:
        """Write the file a last time: the worker ends, or another begins."""
        if self._writing is not None:
            self._writing.stop()
        self._writing = self._recorder = None

    def _give_up(self, error: Exception) -> None:
        """Record nothing, and say why."""
        self._recorder = None
        self._log.warning("%s records nothing: %s", own_name(), words(error))

    def _read(self, read: Callable[[Recorder, Capability], None]) -> None:
        """Let `read` note the layers of a model that is loaded on a GPU of that compute capability, and write the file
        now and then."""
        if self._recorder is None:
            return
        try:
            import torch  # the server has imported it by now

            read(self._recorder, torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
            self._writing = Periodic(self._recorder.write, self._log, "writes no record")
            self._log.info("%s records what the model runs in %s", own_name(), self._recorder.path)
        except Exception as error:
            self._give_up(error)

    def _count(self, count: Callable[[Recorder], None]) -> None:
        """Count a call, if the worker is recorded; whatever goes wrong must not reach the server."""
        try:
            if self._recorder is not None:
                count(self._recorder)
        except Exception as error:
            self._give_up(error)
