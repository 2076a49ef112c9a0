"""The command `aot`, also as `python -m aot`: runs `aot.cli.commands`, or says what to install for it.

A plain install looks at archives; what builds and tunes them comes with extras and may be missing.
"""

from __future__ import annotations

import os
import sys

from .extras import to_install

# The extra that brings a package, none of a plain install; by the name it is imported by or that of its distribution.
_MISSING = {
    "orjson": "",
    "rich": "",
    "typer": "",
    "yaml": "",
    "zstandard": "",
    "jinja2": "report",
    "markupsafe": "report",
    "torch": "tune",
    "cutlass": "build",
    "nvidia-cutlass-dsl": "build",
    "nvidia-cutlass-operators": "build",
}


def main() -> None:
    """Run the command line and end the process."""
    if sys.stderr is None:  # closed by the caller; print() would take standard output in its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lasts
    try:
        from .cli.commands import main as run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _MISSING:
            raise
        print(f"error: {package} is not installed; {to_install(_MISSING[package])}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # `cli.main` has its own way; this is what comes before and after it
        sys.exit(130)


if __name__ == "__main__":
    main()
