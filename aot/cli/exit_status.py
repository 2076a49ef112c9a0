"""How a command ends: its exit status, and one line on standard error that says why.

Status 0; 1 where a check fails, part of what was asked could not be built, archives differ or a layer is missing; 2
where the call is wrong or its output cannot be written; 130 after Ctrl-C, 143 after SIGTERM. Where who reads standard
output has seen enough, as in `aot ls | head`, the process ends by SIGPIPE, which a shell calls 141. Knows none of the
commands.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, cast

import typer

from runtime.errors import AotError

from .streams import prepare, tell

INTERRUPTED = 128 + signal.SIGINT
_UNREAD = 128 + signal.SIGPIPE
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

_UsageError = cast(type[Exception], typer.BadParameter.__base__)  # click's, or that of typer's own copy of click


class Stop(AotError):
    """The end of a command, with an exit status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run(command: Callable[[], Any]) -> NoReturn:
    """Run the command line, which `command` makes, and end the process."""
    terminated = []

    def terminate(*_: object) -> None:
        terminated.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)  # so that workers end, and nothing stays in /tmp
    try:
        prepare()
        status, message = _run(command)
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            status, message = _output_failed(error)
    except KeyboardInterrupt:
        status, message = INTERRUPTED, ""
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if message:
        tell(f"error: {message}")
    if status == _UNREAD:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, for the pipes to workers
        os.kill(os.getpid(), signal.SIGPIPE)
    sys.exit(128 + signal.SIGTERM if terminated and status == INTERRUPTED else status)


def _run(command: Callable[[], Any]) -> tuple[int, str]:
    """Run the command; the exit status, and what there is to say on standard error."""
    if sys.stdout is None:
        return 2, "standard output is closed; redirect it to a file or /dev/null"
    try:
        return command()(prog_name="aot", standalone_mode=False) or 0, ""
    except Stop as stop:
        return stop.status, str(stop)
    except AotError as error:
        return 2, str(error)
    except _UsageError as error:
        return 2, _usage(error)
    except typer.Abort:
        return INTERRUPTED, ""
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return _output_failed(end.__context__)  # which click has made status 1
    except OSError as error:
        return _output_failed(error)


def _usage(error: Any) -> str:
    """A wrong call in a line; the help where there was no command at all."""
    said = _bad_value(error) or str(error.format_message())
    if type(error).__name__ == "NoArgsIsHelpError":
        for line in said.splitlines():
            tell(line)
        return ""
    command = error.ctx.command_path if error.ctx else "aot"
    return f"{said.rstrip('.')}{'' if said.endswith('?') else ';'} `{command} --help` shows how to call it"


# What pydantic calls a number that is none or out of range, and what it must be; the rest of its words are its own.
_MUST_BE = {
    "int_parsing": "an integer",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


def _bad_value(error: Any) -> str:
    """What a number must be that a newer typer has pydantic read, which names neither the option nor what was found;
    nothing of other errors."""
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not details or details[0].get("type") not in _MUST_BE:
        return ""
    first = details[0]
    must_be = _MUST_BE[first["type"]].format(**first.get("ctx", {}))
    return f"{error.param.opts[0]!r} must be {must_be}, found {first['input']!r:.80}"


def _output_failed(error: OSError) -> tuple[int, str]:
    """What an OSError means that no module expected: a file, where it names one, or else standard output."""
    if error.filename is not None:
        return 2, f"{error.filename}: {error.strerror}; check the path and its permissions"
    if error.errno not in _OUTPUT_ERRORS:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes there
    if error.errno == errno.EPIPE:
        return _UNREAD, ""
    return 2, f"standard output cannot be written ({error.strerror}); redirect it elsewhere"
