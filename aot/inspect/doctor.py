"""What this machine has of what building, tuning and serving use, and what to do, as plain data: behind `aot doctor`.

Asks the driver as `runtime.device` does and looks at what is installed; imports neither torch nor the DSL, makes no
context on a GPU, and compiles nothing.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import runtime
from runtime import native
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.device.libcuda import NoDriver
from runtime.errors import AotError, DeviceError
from runtime.tables.dispatch import Capability, serves

from ..compile.cache import Cache, default_directory
from ..extras import to_install
from ..search.targets import TARGETS
from ..version import own_version
from . import build_cache, installed, sass
from .precedence import Precedence

OK, MISSING, BROKEN = "ok", "missing", "broken"
_MODULE = Path("/sys/module/nvidia/version")  # of NVIDIA's kernel module, which says which release a driver is
_LONGEST_S = 20.0  # that a program may take to say its version
_VERSION = re.compile(r"\bV(\d[\d.]*)")  # as nvdisasm says it
_KEY = "0" * 64  # of no kernel


@dataclass(frozen=True)
class Finding:
    """What was found of one part of the machine.

    `state` is "ok", "missing" for what can be done without and is not there, or "broken" for what is there and does not
    work. `remedy` says what to do where it is not "ok".
    """

    part: str
    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Device:
    """A GPU as the driver tells of it: its kind, in words, and its compute capability."""

    words: str
    capability: Capability


def examine(archives: Iterable[Path] = ()) -> list[Finding]:
    """Everything that was found, in the order in which it is told; with no `archives`, of the package's own."""
    driver, devices = _driver()
    named = list(archives)
    return [
        Finding("python", OK, f"{platform.python_version()}, {platform.machine()}"),
        Finding("cute-aot", OK, f"{own_version()} in {Path(__file__).parents[2]}"),
        driver,
        *_gpus(devices),
        _native(),
        _package("DSL", "nvidia-cutlass-dsl", "cutlass", "`aot build` needs it: the extra build has it"),
        _torch(devices),
        _nvdisasm(),
        _cache(),
        *(_archive(path, devices, True) for path in named),
        *([] if named else [_archive(runtime.universal(), devices, False)]),
        *_extras(),
    ]


def _driver() -> tuple[Finding, list[Device]]:
    """The driver, and the GPUs that it lets this process see."""
    release = _release()
    try:
        first = Driver(0)
        count, cuda = first.device_count, first.cuda_version
        drivers = [first, *(Driver(ordinal) for ordinal in range(1, count))]
        devices = [Device(driver.gpu.words(), driver.compute_capability) for driver in drivers]
    except NoDriver:
        remedy = "tuning and serving need NVIDIA's driver; building and looking at archives do without"
        return Finding("driver", MISSING, "libcuda.so.1 is not installed", remedy), []
    except DeviceError as error:
        remedy = "see what `nvidia-smi` says, and whether CUDA_VISIBLE_DEVICES hides all GPUs"
        return Finding("driver", BROKEN, f"{release}{error}", remedy), []
    return Finding("driver", OK, f"{release}CUDA {cuda}"), devices


def _release() -> str:
    """The release of the kernel module, such as "580.95.05, "; empty where nothing says it."""
    try:
        return f"{_MODULE.read_text(encoding='ascii').strip()}, "
    except (OSError, ValueError):
        return ""


def _gpus(devices: list[Device]) -> Iterator[Finding]:
    """A finding for each kind of GPU."""
    for device, number in Counter(devices).items():
        major, minor = device.capability
        targets = [name for name in TARGETS if serves(name, device.capability)]
        words = f"{number} x {device.words}" if number > 1 else device.words
        found = f"{words}, {', '.join(targets) or f'compute capability {major}.{minor}'}"
        if targets:
            yield Finding("GPU", OK, found)
        else:
            remedy = f"no target runs on it: cute-aot has {', '.join(TARGETS)}"
            yield Finding("GPU", MISSING, found, remedy)


def _native() -> Finding:
    if native.loaded:
        return Finding("native code", OK, str(native._native.__file__))
    built = util.find_spec("runtime.native._native")
    again = "install a wheel of cute-aot, or `pip install .` in a checkout where there is a C compiler"
    if built is None:
        return Finding("native code", MISSING, "not built; launches go through Python and take longer", again)
    return Finding("native code", BROKEN, f"{built.origin} does not load or is of another version", again)


def _package(part: str, distribution: str, package: str, missing: str) -> Finding:
    """A distribution, and whether its `package` is there; `missing` says what to do where it is not installed."""
    version = installed.version(distribution)
    if version is None:
        return Finding(part, MISSING, f"{distribution} is not installed", missing)
    if not installed.importable(package):
        remedy = f"pip install --force-reinstall {distribution}=={version}"
        return Finding(part, BROKEN, f"{distribution} {version} is installed, but nothing that imports", remedy)
    return Finding(part, OK, f"{distribution} {version}")


def _torch(devices: list[Device]) -> Finding:
    found = _package("torch", "torch", "torch", "`aot tune` needs it: the extra tune has it")
    if found.state == OK and devices and found.found.endswith("+cpu"):
        return Finding("torch", BROKEN, f"{found.found} sees no GPU", "install a build of torch for CUDA")
    return found


def _nvdisasm() -> Finding:
    """nvdisasm, which `aot extract --sass` runs."""
    try:
        program = sass.nvdisasm()
    except sass.NoDisassembler:
        remedy = "`aot extract --sass` needs it: pip install nvidia-cuda-nvdisasm"
        return Finding("nvdisasm", MISSING, "not installed", remedy)
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_LONGEST_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        remedy = "pip install --force-reinstall nvidia-cuda-nvdisasm"
        return Finding("nvdisasm", BROKEN, f"{program} does not run ({error})", remedy)
    version = _VERSION.search(done.stdout)
    return Finding("nvdisasm", OK, f"{version[1] if version else 'of no version'}, {program}")


def _cache() -> Finding:
    """The build cache of its usual place."""
    folder = default_directory()
    if folder is None:
        return Finding("build cache", MISSING, "this user has no home directory", "name a folder with --cache")
    try:
        Cache(folder).get(_KEY)
        entries = build_cache.entries(folder) if folder.exists() else []
    except AotError as error:
        return Finding("build cache", BROKEN, str(error), "put that right, or name another folder with --cache")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("build cache", BROKEN, f"{there} cannot be written", "name another folder with --cache")
    size = sum(entry.bytes for entry in entries)
    holds = f"{len(entries)} entries, {size / 1e6:,.0f} MB" if entries else "empty"
    return Finding("build cache", OK, f"{holds}, {folder}")


def _archive(path: Path, devices: list[Device], named: bool) -> Finding:
    """An archive, whether it is whole, and whether it has functions for the GPUs here. One that was `named` and has
    none is broken; the package's own is for Hopper."""
    part = "archive" if named else "its archive"
    try:
        with Archive.open(path) as archive:
            archive.check_blocks()
            found = Precedence(archive)
    except AotError as error:
        return Finding(part, BROKEN, str(error), f"`aot verify {path}` says more; build or copy it again")
    forms = [] if found.universal is None else [form.target for _, form in found.universal.forms]
    targets = sorted({entry.target for entry in found.entries} | set(forms))
    holds = f"{path.name}: {len(found.entries)} entries, {len(forms)} forms, {', '.join(targets) or 'no target'}"
    without = {d.words for d in devices if not any(serves(target, d.capability) for target in targets)}
    if without:
        remedy = f"build for {', '.join(sorted(without))}: `aot build --target`"
        return Finding(part, BROKEN if named else MISSING, f"{holds}: nothing for the GPU here", remedy)
    return Finding(part, OK, f"{holds}{', serves this GPU' if devices else ''}")


def _extras() -> Iterator[Finding]:
    known = installed.extras()
    if known is None:
        yield Finding("extras", MISSING, "runs from its source tree, with no install", to_install())
    for extra in known or []:
        if extra.lacking:
            found = f"lacks {', '.join(extra.lacking)}"
            yield Finding(f"extra {extra.name}", MISSING, found, to_install(extra.name))
        else:
            yield Finding(f"extra {extra.name}", OK, "installed")
