"""Build the wheels of a release, for Linux on x86-64 and on aarch64, with no container and no C compiler of the system.

    pip install '.[wheels]'
    python scripts/build_wheels.py -o dist

zig's C compiler, which the package ziglang brings, compiles native code for both, against glibc 2.17 and Python's
stable ABI, so that one wheel of each serves every Python from 3.10. `auditwheel show` then says whether a wheel keeps
to what its name promises. Python's own headers are those of the Python that runs this, for both.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import util
from pathlib import Path

import report  # also puts the checkout on the path

from runtime.errors import AotError

MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 17)  # of manylinux2014: RHEL 7 and all that is newer
_SOURCES = ("aot", "runtime", "pyproject.toml", "README.md", "LICENSE")
_NATIVE = "runtime/native/_native.abi3.so"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
_MOST_S = 600.0  # a wheel takes a quarter of a minute, and zig's first use of a target as much again
_LAST_CHARACTERS = 800  # of what a tool said, where it failed


def tag(machine: str) -> str:
    """The platform tag of the wheel for `machine`, such as "manylinux_2_17_x86_64"."""
    return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"


def compiler(machine: str) -> dict[str, str]:
    """The environment that has setuptools compile for `machine` with zig, whatever this Python was compiled with.

    Raises:
        AotError: ziglang is not installed.
    """
    found = util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise AotError("ziglang is not installed; pip install '.[wheels]' in the checkout")
    # The program itself: pip builds where `python -m ziglang` finds no module.
    program = shlex.quote(str(Path(found.origin).with_name("zig")))
    zig = f"{program} cc -target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    return {
        "CC": zig,
        "LDSHARED": f"{zig} -shared -Wl,-s",
        "LDFLAGS": "",
        "CFLAGS": "-fwrapv -DNDEBUG",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # which setuptools names the build's folder after
    }


def build(machine: str, output: Path) -> Path:
    """Build the wheel for `machine` into the folder `output`; its file. The checkout stays as it is.

    Raises:
        AotError: pip fails, or what it makes has no native code for `machine` or needs more than its name says.
    """
    with tempfile.TemporaryDirectory() as made:
        tree, wheels = Path(made, "tree"), Path(made, "wheels")
        tree.mkdir()
        for name in _SOURCES:
            source = report.ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=_LEFT_OUT)
            else:
                shutil.copy2(source, tree / name)
        project = tree / "pyproject.toml"  # an install goes on where native code does not compile, a release does not
        project.write_text(project.read_text().replace("\noptional = true\n", "\noptional = false\n"))
        option = f"--config-settings=--build-option=--plat-name={tag(machine)}"
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", option, "-w", str(wheels), str(tree)]
        _run(command, os.environ | compiler(machine))
        wheel = next(wheels.glob(f"*-cp310-abi3-{tag(machine)}.whl"))
        if _NATIVE not in zipfile.ZipFile(wheel).namelist():
            raise AotError(f"{wheel.name}: has no {_NATIVE}; see `ext-modules` of pyproject.toml")
        require_kept(wheel, machine)
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, output / wheel.name))


def require_kept(wheel: Path, machine: str) -> None:
    """Refuse a wheel that `auditwheel show` finds to need a newer glibc, or other libraries, than its name says, or
    whose log and exp are not libm's: those of zig would choose other kernels than Python does.

    Raises:
        AotError: it is one.
    """
    said = _run([sys.executable, "-m", "auditwheel", "show", str(wheel)], dict(os.environ))
    found = re.search(rf'"manylinux_(\d+)_(\d+)_{machine}"', said)
    if "libm.so.6" not in said:
        raise AotError(f"{wheel.name}: has a log and an exp of its own; keep its C code from calls into compiler-rt")
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        raise AotError(f"{wheel.name}: is not what {tag(machine)} promises; auditwheel said: {' '.join(said.split())}")


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_MOST_S
    )
    if done.returncode:
        what = " ".join(command[1:4])
        raise AotError(f"python {what} failed: {done.stdout[-_LAST_CHARACTERS:].strip()}")
    return done.stdout


def main() -> None:
    """Build the wheels and say how large each is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("dist"), metavar="DIR", help="default: dist")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="only this one; may be given again")
    options = parser.parse_args()
    for machine in options.machine or MACHINES:
        wheel = build(machine, options.output)
        print(f"{wheel}  {wheel.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(report.ends(main))
