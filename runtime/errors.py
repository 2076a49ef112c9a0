"""Every failure that a caller of the runtime or the builder is expected to meet.

One class for each thing a caller handles differently. A message says what was asked, what was found, and
what to do. The command line prints it as one line and exits with status 2; nothing here knows of that.
"""


class AotError(Exception):
    """Base of all expected failures."""


class ArchiveError(AotError):
    """An archive file cannot be trusted or read; `runtime.container.archive` names each way."""


class SignatureError(AotError):
    """An archive that must be signed is not, or not by a key that counts, or nothing here can tell."""


class RecordError(AotError):
    """A function record is malformed or holds something this version does not know."""


class UnsupportedSchema(RecordError):
    """A record or table of a schema that this version does not read; the archive must be built again."""


class ProgramError(AotError):
    """A launch program cannot serve these extents: a guard failed, a loop ran away, a grid is out of range."""


class ArgumentError(AotError):
    """A caller's tensor or scalar does not fit the function's description."""


class LayoutError(ArgumentError):
    """The tensor is right but not where or how it lies in memory; a copy, or another function, may do.

    `reason` says in few words what is wrong, and is the same for all addresses and strides that are so.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class KernelMiss(AotError):
    """The archive has no kernel for the request; the message names the nearest entries and why each was rejected.

    `reason` says in few words what kind of miss it is: "no entry", "not tuned", "not batch-invariant", "no
    kernel runs" or "damaged".
    """

    def __init__(self, message: str, reason: str = "no entry") -> None:
        super().__init__(message)
        self.reason = reason


class DeviceError(AotError):
    """A driver call failed, or this GPU is not what the archive or the function was made for."""


class WorkspaceError(DeviceError):
    """There is no device memory left for a workspace, or none that captures may share: the function is right, and may
    be launched when there is."""
