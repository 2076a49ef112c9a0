"""The SASS of a cubin, by NVIDIA's nvdisasm, where that is installed. Knows nothing of archives."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from runtime.errors import AotError

_TOOLKIT = Path("/usr/local/cuda/bin/nvdisasm")
_LONGEST_S = 120.0  # a cubin takes less than a second


class NoDisassembler(AotError):
    """nvdisasm is not installed, or fails."""


def sass(cubin: bytes) -> str:
    """What nvdisasm prints of a cubin.

    Raises:
        NoDisassembler: there is none here, or it refuses the cubin.
    """
    program = nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run([program, file.name], capture_output=True, text=True, timeout=_LONGEST_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoDisassembler(f"{program}: does not run ({error}); install the toolkit's again") from None
    if done.returncode:
        reason = " ".join(done.stderr.split())[:200]
        raise NoDisassembler(
            f"{program}: cannot read the cubin ({reason}); it may be of a newer toolkit's architecture"
        )
    return done.stdout


def nvdisasm() -> str:
    """Where nvdisasm is: the one on the path, else that of NVIDIA's wheel, else that of the CUDA toolkit in its usual
    place.

    Raises:
        NoDisassembler: it is in none of them.
    """
    wheel = next(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"), None)
    for found in (shutil.which("nvdisasm"), wheel, _TOOLKIT if _TOOLKIT.exists() else None):
        if found is not None:
            return str(found)
    raise NoDisassembler(
        "nvdisasm is not installed; pip install nvidia-cuda-nvdisasm, or write the cubin with --cubin and disassemble "
        "it where the CUDA toolkit is"
    )
