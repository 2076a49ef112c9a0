"""An opened archive on one device: look a GEMM up, plan it for its shape once, and from then on only launch.

The steady state of `Library.gemm` is one dictionary lookup, the pointers written into a prepared launch, and
cuLaunchKernelEx. Everything else happens at the first call of a shape, or in `Library.preload`: nothing is ever
compiled here. Knows nothing of how kernels were made, ranked or tuned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..container.archive import Archive
from ..device.driver import Driver
from ..device.workspace import Workspaces
from ..errors import ArgumentError, DeviceError
from ..gemm.signature import Signature
from ..gemm.universal import AnyEntry
from ..native import loaded as native_loaded
from ..program.operation import Signature as AnySignature
from .counters import Counters
from .function import Function
from .gemm.plans import Preloaded
from .generation import Generation
from .layers import Open, Paths, open_archives, paths_of
from .options import USUAL, Options
from .packed_calls import PackedCalls
from .stats import ArchiveInfo, Refusal, Stats, prometheus_text

MISS_REASONS = ("no entry", "not tuned", "not batch-invariant", "no kernel runs", "damaged")  # those of a `KernelMiss`
_log = logging.getLogger(__name__)


# Every library by its `id`: torch.compile can carry that through a trace, but no object.
alive: weakref.WeakValueDictionary[int, Library] = weakref.WeakValueDictionary()


class Library(PackedCalls):
    """Open archives on one device, the base first. All methods may be called from any thread.

    A gemm that several archives have is served by the last, whose functions are taken from the same file. `stats` and
    `prometheus` say what was done so far; `misses` counts the calls that fell back, by the key of their signature, with
    what was wrong (", strides of a") where that was how a tensor lies in memory.
    """

    def __init__(
        self,
        archives: Archive | Sequence[Archive],
        driver: Driver,
        options: Options = USUAL,
        *,
        open_files: Open = open_archives,
    ) -> None:
        """`archives` are open, and `options` were checked; `open_files` opens the archives of later reloads."""
        lock = threading.RLock()  # held for moments: while a shape is planned, a kernel loaded, generations swapped
        super().__init__(driver, options, Counters(), lock)
        self._changing = threading.Lock()  # held by what works for longer: preload, reload, drop_old, close
        self._workspaces = Workspaces(driver, shared=options.capture_workspaces == "shared")
        self._serve(self._generation([archives] if isinstance(archives, Archive) else archives))
        self._paths: tuple[str | os.PathLike[str], ...] = tuple(archive.path for archive in self._now.layers.archives)
        self._open_files = open_files
        self._replaced: list[Generation] = []
        alive[id(self)] = self

    def _generation(self, archives: Sequence[Archive]) -> Generation:
        return Generation(archives, self._driver, self._workspaces, self._counters, self._lock, self._options)

    @property
    def digest(self) -> str:
        """The SHA-256 that names the archive; of several, one that covers them all and their order."""
        return self._now.layers.digest

    @property
    def functions(self) -> Mapping[str, Function]:
        """Every function by name, those of the last archive first, which also takes the place of others of its name."""
        return self._now.layers.functions

    @property
    def misses(self) -> dict[str, int]:
        """How many calls fell back to torch, by the key of their signature and what was wrong with a layout."""
        found: dict[str, int] = {}
        for (signature, reason), refusals in list(self._counters.refusals.items()):
            key = signature if reason in MISS_REASONS else f"{signature}, {reason}"
            if refusals.fallbacks:
                found[key] = found.get(key, 0) + refusals.fallbacks
        return found

    @property
    def device(self) -> str:
        """The device it is for, as torch writes it: "cuda:0". Finds out which one is current where none was named."""
        return f"cuda:{self._driver.device}"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def identity(self) -> str:
        """A word for archive, device and options, the same in every process, by which compiled graphs may be kept."""
        return " ".join(map(str, (self.digest, self.device, *self._options)))

    def entry(self, signature: AnySignature | str) -> AnyEntry:
        """What serves `signature`, which may be given by its key, on this GPU; nothing is loaded.

        An entry of an operation's table, or a `runtime.gemm.universal.PredictedEntry` by a universal table.

        Raises:
            ArgumentError: it is neither a signature nor the key of one.
            KernelMiss: nothing, or nothing that `require` accepts; the message names the nearest entries.
            ArchiveClosed: the library was closed.
            DeviceError: the archive has nothing for this GPU.
        """
        self._refuse_if_closed()
        wanted: Any = signature
        if isinstance(signature, str):
            found = (each.of.of_key(signature) for each in self._now.all_entries())
            wanted = Signature.of_key(signature) or next((one for one in found if one is not None), None)
        if not isinstance(getattr(wanted, "operation", None), str):
            raise ArgumentError(f"signature must be one or its key, as `aot ls` lists them, found {signature!r:.200}")
        return self._now.entries_of(wanted.operation).entry(wanted)

    def is_tuned(self, signature: AnySignature) -> bool:
        """Whether what serves `signature` on this GPU was tuned; False where nothing does. Raises as `entry` does but
        for that."""
        self._refuse_if_closed()
        entry = self._now.entries_of(signature.operation).find(signature)
        return entry is not None and entry.state == "tuned"

    def checked(self, entry: AnyEntry) -> bool:
        """Whether the functions of an entry of this library were found right on a GPU: it is tuned, or predicted by a
        universal table whose functions were checked."""
        return entry.state == "tuned" or bool(self._now.entries.checked_on(entry))

    def __repr__(self) -> str:
        """What it is of, in words; asks no driver, reads no file, and may be asked of a closed library."""
        now = self._now
        targets = dict.fromkeys(target for archive in now.layers.archives for target in archive.targets)
        words = [f"{len(now.layers.functions)} functions for {', '.join(targets) or 'no target'}"]
        if now.entries.signatures is not None:
            words.append(
                f"{now.entries.signatures} signatures"
                + (f" and {now.entries.forms} forms" if now.entries.forms else "")
            )
        device = self._driver.known_device
        words.append("closed" if self._closed else "no device yet" if device is None else f"cuda:{device}")
        return f"<Library of {now.layers.path}: {', '.join(words)}>"

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the kernels, free their workspaces and close the archives.

        No call may be under way, and no kernel running or in a CUDA graph that is still used.
        """
        with self._changing, self._lock:
            if self._closed:
                return
            self._closed = True
            self._now_native = None
            contents, self._replaced = [*self._replaced, self._now], []
            with contextlib.ExitStack() as stack:  # all of it, whatever fails
                stack.callback(self._workspaces.close)
                for each in contents:
                    stack.callback(each.close)

    def forget_captures(self) -> None:
        """Free the workspaces that CUDA graphs were captured with, of which each capture has its own.

        Those graphs may not be replayed again, and no capture may be under way. Only kernels that share tiles through
        memory (`stream_k`) have any. With `capture_workspaces="shared"` those that captures share stay, for captures
        to come; freed is what a larger one took the place of.
        """
        self._workspaces.forget_captures()

    def preload(self, tokens: Sequence[int] = (), *, only: Iterable[Signature | str] | None = None) -> tuple[str, ...]:
        """Load every kernel that the tables use on this device, and return their functions' names.

        From then on `gemm` opens and reads no file, imports nothing and loads no kernel, whatever it is asked for: a
        first call of a shape does no more than arithmetic before it launches, under stream capture too. For the M
        values in `tokens` not even that, where the tensors are contiguous matrices (and numbers, such as eps, the usual
        ones), and torch's only if torch is imported before: an import that is under way is waited for. What fits is
        tried for each function of an entry at the least M that it serves, at the largest that ends a range of it, and
        at `tokens`; where it cannot run on this GPU there, runners-up are loaded until one can. Where that is so at
        another M only, another function of the entry that is loaded serves, the nearest range's first; where none of
        them can, the call is a miss. A later `preload` may add to this, and `reload` keeps to it. One that raises
        promises nothing more, and leaves on the device what it had loaded.

        `only` names the signatures that are meant, or their keys, as a model needs of an archive of many: all this then
        holds for them, and kernels for others go on being loaded at their first call.

        Not included are entries that `require` refuses, functions called by name (call their `load`), and workspaces:
        a kernel that needs one still allocates it at its first launch on a stream, or in a capture. What captures share
        (`capture_workspaces="shared"`) is included, for captures that launch such kernels on one stream each.

        Raises:
            ArgumentError: an M is not a positive integer, `only` holds what is no signature, or these are more plans
                than are kept.
            KernelMiss: the archive has nothing for a signature in `only`.
            DeviceError: the driver refused, or the archive has nothing for this GPU.
            WorkspaceError: there is no memory for the workspaces that captures share, or they may not have so much.
            ArchiveError: the archive is damaged, or the library was closed.
            RecordError: a table or a record is malformed.
        """
        if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes):
            raise ArgumentError(f"tokens must be a sequence of M values, such as [1, 16], found {tokens!r:.50}")
        for m in tokens:
            if type(m) is not int or m < 1:
                raise ArgumentError(f"tokens must be positive integers, found {m!r:.50}")
        asked = Preloaded(tuple(sorted(set(tokens))), None if only is None else _keys(only))
        with self._changing:
            self._refuse_if_closed()
            return self._now.preloader.preload(asked)

    # --- other contents ---

    def reload(self, path: Paths | None = None) -> bool:
        """Serve what is in the files now, or in others; whether that changed anything.

        Everything that can go wrong goes wrong before the change, and then all stays as it was: the files are opened
        and read in full, and what the library had done is done for them, `preload` included. Calls that begin once this
        has returned get kernels of the new files; calls under way, and CUDA graphs, go on with the old ones, which stay
        loaded until `drop_old` or `close`. Every shape is planned again at its next call.

        `path` is as `load` takes it, and also what later calls without one take; None is the last one that was given.

        Raises:
            ArchiveError: a file is missing or damaged, or the library was closed.
            DeviceError: the files have nothing for this GPU, or the driver refused their kernels.
            RecordError: a gemm table or a record is malformed.
            ArgumentError: there is no path, or the M values that were preloaded are more plans than are kept.
            SignatureError: the library was loaded with `require_signed`, and an archive is not to be trusted any more.
        """
        with self._changing:
            self._refuse_if_closed()
            old, paths = self._now, self._paths if path is None else paths_of(path)
            new = self._generation(self._open_files(paths))
            try:
                changed = new.layers.digest != old.layers.digest
                if changed:
                    new.check_files()
                    if old.entries.used:
                        new.layers.check_device()
                    if old.plans.preloaded is not None:
                        new.preloader.preload(old.plans.preloaded, as_many_as_fit=True)
            except BaseException:
                try:
                    new.close()
                except DeviceError as error:
                    _log.warning(
                        "%s was not put in service, and not all of it was unloaded: %s", new.layers.path, error
                    )
                raise
            self._paths = paths
            if not changed:
                new.close()
                return False
            with self._lock:
                self._serve(new)
                self._replaced.append(old)
                self._workspaces.reloaded()
            self._counters.reloaded()
        return True

    def drop_old(self) -> int:
        """Unload the kernels of contents that `reload` replaced; how many contents have to wait for another time. Once
        none has, shared workspaces that became too small before the reload are freed.

        CUDA graphs that were captured before the reload may not be replayed again: that is the caller's to know. Calls
        that are under way are not: contents that one of them may still launch from are left alone, and for what was
        launched this waits, until the device is idle.

        Raises:
            DeviceError: a stream is being captured, which allows no such wait and may be lost by the attempt, or the
                driver refused; where it was the wait, nothing was unloaded, else all that it did not refuse. A later
                call tries what is left.
            ArchiveError: the library was closed.
        """
        with self._changing:
            self._refuse_if_closed()
            with self._lock:
                busy = [each for each in self._replaced if each.retire()]
            idle = [each for each in self._replaced if each not in busy]
            if idle:
                self._driver.synchronize()
            left, failure = list(busy), None
            for each in idle:
                try:
                    each.close()
                except DeviceError as error:
                    left.append(each)
                    failure = failure or error
            with self._lock:
                self._replaced = left
            if not left:
                self._workspaces.drop_outgrown()
            if failure is not None:
                raise failure
        return len(busy)

    # --- what was done ---

    def stats(self) -> Stats:
        """What the library has done so far, and what it holds; see `runtime.serve.stats.Stats`."""
        counters = self._counters
        with self._lock:
            now = self._now
            contents = [now, *self._replaced]
        functions = [function for each in contents for function in each.layers.made() if function.loaded]
        refusals = [Refusal(*key, r.misses, r.fallbacks) for key, r in list(counters.refusals.items())]
        launches = {name: counter.read() for name, counter in sorted(counters.launches.items())}
        workspaces, workspace_bytes, shared_workspace_bytes = self._workspaces.held()
        return Stats(
            archives=tuple(ArchiveInfo(archive.path, archive.digest) for archive in now.layers.archives),
            digest=now.layers.digest,
            reloads=counters.reloads,
            replaced=len(contents) - 1,
            launches=sum(launches.values()),
            launches_by_function={name: count for name, count in launches.items() if count},
            refusals=tuple(sorted(refusals, key=lambda r: (-r.misses, r.signature, r.reason))),
            given_to_torch=counters.given_to_torch.read(),
            damaged=tuple(sorted(now.layers.damaged())),
            kernels_loaded=len(functions),
            kernel_bytes=sum(function.loaded_bytes for function in functions),
            loads=counters.loads,
            load_seconds=counters.load_seconds,
            longest_load_seconds=counters.longest_load_seconds,
            plans_made=counters.plans,
            plans_held=now.plans.held(),
            workspaces=workspaces,
            workspace_bytes=workspace_bytes,
            shared_workspace_bytes=shared_workspace_bytes,
            native=native_loaded,
            gpu=now.entries.gpu,
            tuned_for=now.entries.tuned_for,
        )

    def prometheus(self, name: str | None = None) -> str:
        """`stats` in Prometheus' text format; the label `library` is `name`, or the file name of the last archive.

        For several libraries in one answer: `runtime.serve.stats.prometheus_text`.
        """
        stats = self.stats()
        return prometheus_text({name or os.path.basename(stats.archives[-1].path): stats})


def _keys(signatures: Iterable[Signature | str]) -> frozenset[str]:
    """The keys of signatures, some of which may be given as such."""
    if isinstance(signatures, str | Signature) or not isinstance(signatures, Iterable):
        raise ArgumentError(f"only must be a sequence of signatures or their keys, found {signatures!r:.80}")
    keys = [s.key() if isinstance(s, Signature) else s for s in signatures]
    for key in keys:
        if not isinstance(key, str):
            raise ArgumentError(f"only must hold signatures or their keys, found {key!r:.80}")
    return frozenset(keys)
