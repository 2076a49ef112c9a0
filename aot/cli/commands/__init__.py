"""The command `aot`: a module for each of its commands, which reads arguments, calls what does the work, and prints.

`aot.cli.exit_status` has the exit statuses. Importing this imports neither torch nor the DSL, which take seconds.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer

from ...version import own_version
from .. import exit_status
from ..arguments import examples
from . import (
    build,
    cache,
    coverage,
    diff,
    doctor,
    explain,
    extract,
    history,
    info,
    ls,
    manifest,
    merge,
    prune,
    rebuild,
    report,
    show,
    sign,
    tune,
    verify,
)

app = typer.Typer(
    help="Compile and tune CuTe DSL kernels offline, into one file that runs with no compiler.",
    epilog=examples("aot build model.yaml -o model.aot", "aot ls model.aot"),
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_manifest = typer.Typer(
    help="Write manifests; docs/manifests.md says what they may hold.",
    epilog=manifest.FROM_CONFIG,
    no_args_is_help=True,
    rich_markup_mode=None,
)


_cache = typer.Typer(help="Look after the build cache.", epilog=cache.INFO, no_args_is_help=True, rich_markup_mode=None)


@functools.cache
def command() -> Any:
    """`app` as click calls it, made once: typer reads the annotations of all commands for it, which takes 35 ms."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line and end the process."""
    exit_status.run(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(own_version())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _add(name: str, module: Any) -> None:
    """A command in a module of its name."""
    app.command(name, epilog=module.EXAMPLES)(module.command)


# In the order of `aot --help`.
_add("build", build)
_add("tune", tune)
_add("info", info)
_add("ls", ls)
_add("show", show)
_add("explain", explain)
_add("coverage", coverage)
_add("diff", diff)
_add("history", history)
_add("report", report)
_add("extract", extract)
_add("prune", prune)
_add("merge", merge)
_add("verify", verify)
_add("sign", sign)
_add("rebuild", rebuild)
_add("doctor", doctor)
app.add_typer(_manifest, name="manifest")
_manifest.command("from-config", epilog=manifest.FROM_CONFIG)(manifest.from_config)
_manifest.command("from-server", epilog=manifest.FROM_SERVER)(manifest.from_server)
app.add_typer(_cache, name="cache")
_cache.command("info", epilog=cache.INFO)(cache.info)
_cache.command("prune", epilog=cache.PRUNE)(cache.prune)
