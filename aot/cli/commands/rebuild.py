"""`aot rebuild`: an archive built anew from what it says of itself, and held against that, byte for byte."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.container.archive import Archive
from runtime.errors import AotError
from runtime.signing.check import signature_path

from ..arguments import ArchivePath, Force, Json, SpecPath, count, examples
from ..inputs import open_archive, refuse_outputs
from ..output import require_replaceable
from ..streams import print_json, printable, say, warn
from .build import Wanted, compile_selection, select

if TYPE_CHECKING:
    from ...pack.build_table import Build
    from ...selection import Selection
    from ...verify.rebuilt import Comparison

EXAMPLES = examples(
    "aot rebuild model.aot model.yaml --check",
    "aot rebuild model.aot model.yaml --check --key keys -o candidates.aot",
)
_MOST = 10  # differences that are printed


def command(
    archive: ArchivePath,
    manifests: Annotated[
        list[Path] | None, typer.Argument(metavar="MANIFEST", help="Those that it was built of.", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare; exit status 1 where bytes differ.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="OUT", help="Keep what is built.")] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="KEYS", help="A public key, or a folder of them, that must have signed it.")
    ] = None,
    signature: Annotated[
        Path | None, typer.Option(metavar="SIG", help="Default: ARCHIVE with .sig behind its name, where it is there.")
    ] = None,
    base: Annotated[Path | None, typer.Option(metavar="BASE", help="As it was given to `aot build`.")] = None,
    spec: SpecPath = None,
    times: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="As it was given to `aot build`. May be repeated.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile. Default: usable cores.")] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A build cache that you trust. Default: every kernel is compiled."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Build an archive again from what it says of its build, with the tools installed here, which must be those.

    A ranked archive must come out as the same bytes. A tuned one has functions of the candidates that were measured:
    these are built, and each of its functions must be one of them, byte for byte.
    """
    from ...verify.rebuilt import asked_of, require_whole

    if not check and output is None:
        raise AotError("say what for: --check compares, -o OUT keeps what is built")
    if output is not None:
        inputs = [archive, *(manifests or ()), *(p for p in (base, spec, signature) if p), *(times or ())]
        refuse_outputs(output, inputs)
        require_replaceable(output, force)
    with open_archive(archive) as opened, tempfile.TemporaryDirectory(prefix="aot-rebuild-") as folder:
        asked_of(opened)
        require_whole(opened)  # before what takes minutes
        contents = _signed_contents(opened, archive, key, signature)
        work, tools = _plan(opened, manifests or (), base, spec, times or (), contents)
        made = output or Path(folder) / "rebuilt.aot"
        compile_selection(work, made, cache or Path(folder) / "cache", jobs, base, verbose=False)
        with Archive.open(made) as rebuilt:
            summary = _compared(opened, rebuilt, as_json) if check else {"archive": str(archive)}
    summary |= {"output": None if output is None else str(output), "tools": tools, "contents": len(contents or ())}
    if as_json:
        print_json(summary)
    elif output is not None:
        say(f"{output}: built as {archive} says")
    if not summary.get("same", True):
        raise typer.Exit(1)


def _signed_contents(opened: Archive, archive: Path, key: Path | None, signature: Path | None) -> dict[str, str]:
    """What the signature says of the contents of tools; nothing where there is no signature, or none that says so."""
    from runtime.signing.keys import read_keys

    from ...sign.tools import signed_contents

    path = signature or Path(signature_path(archive))
    if key is None and signature is None and not path.exists():
        warn(f"{path}: is not there, so versions of tools are compared and their contents are not")
        return {}
    found = signed_contents(opened, path, None if key is None else read_keys(key))
    if not found:
        warn(
            f"{path}: does not say what tools consist of, so their versions are compared alone; sign with --built-here"
        )
    return found


def _plan(
    opened: Archive,
    manifests: list[Path] | tuple[()],
    base: Path | None,
    spec: Path | None,
    times: list[Path] | tuple[()],
    contents: dict[str, str],
) -> tuple[Selection, int]:
    """What to compile, and of how many tools the versions are those of the archive's build."""
    from ...pack import build_table
    from ...verify import rebuilt

    build, asked = rebuilt.asked_of(opened)
    given, below = build_table.input_digests(spec, times), 0
    if base is not None:
        with open_archive(base) as under:
            given |= build_table.input_digests(base=under)
            below = len(build_table.read(under).models)
    rebuilt.require_inputs(opened, dict(asked.inputs), given)
    paths = rebuilt.in_order(opened, build.models[below:], _manifests(manifests))
    wanted = Wanted(asked.targets, build.candidates, asked.functions, spec, asked.universal, times)
    work = select([Path(path) for path in paths], wanted)
    return work, _require_tools(opened, build, work, contents)


def _manifests(paths: list[Path] | tuple[()]) -> dict[str, str]:
    """What archives name each manifest by."""
    from ...problem import manifest

    return {str(path): manifest.digest(manifest.load(path)) for path in paths}


def _require_tools(opened: Archive, build: Build, work: Selection, contents: dict[str, str]) -> int:
    """Refuse tools, or sources of kernels, other than those that the archive was built with; how many were compared."""
    from ...compile.cache import Cache
    from ...compile.toolchain import toolchain
    from ...search.provider import source_digest
    from ...search.variants import Variant
    from ...verify import rebuilt
    from ...version import own_version

    installed = toolchain(Cache(None))
    here = installed.versions | {"cute-aot": own_version()}
    rebuilt.require_tools(
        opened, "versions of tools", build.tools, here, set(build.tools) & ({*here} | _of_compilers(build.tools))
    )
    held = {name: words.rpartition(" ")[2] for name, words in installed.wheels.items()}
    rebuilt.require_tools(opened, "contents of tools", contents, held)
    sources = {f"{v.provider}.{v.family}": source_digest(v) for v in work.variants() if isinstance(v, Variant)}
    rebuilt.require_tools(opened, "sources of kernels", build.providers, sources, set(build.providers) & set(sources))
    return len(build.tools)


def _of_compilers(tools: Any) -> set[str]:
    """The tools that every build has: a spec's packages are held by the digests of its kernels."""
    return {name for name in tools if name.startswith("nvidia-") or name in ("python", "zstandard", "zstd")}


def _compared(opened: Archive, rebuilt: Archive, as_json: bool) -> dict[str, Any]:
    from ...verify.rebuilt import compare

    found = compare(opened, rebuilt)
    if not as_json:
        print_comparison(opened, found)
    return {
        "archive": opened.path,
        "same": not found.differences,
        "same_file": found.same_file,
        "tuned": found.tuned,
        "candidates": found.candidates,
        "rebuilt": rebuilt.digest,
        "functions": found.functions,
        "differences": [{"subject": each.subject, "detail": each.detail} for each in found.differences],
    }


def print_comparison(opened: Archive, found: Comparison) -> None:
    """What `aot rebuild --check` prints."""
    functions = count(found.functions, "function")
    for each in found.differences[:_MOST]:
        print(printable(f"{each.subject}: {each.detail}"))
    if len(found.differences) > _MOST:
        print(f"and {len(found.differences) - _MOST} more; --json has them all")
    if found.differences:
        say(f"{opened.path}: is not what was built here: {count(len(found.differences), 'difference')}")
    elif found.same_file:
        say(f"{opened.path}: the same bytes were built, {functions}")
    elif found.candidates is None:
        say(f"{opened.path}: each of its {functions} is one that was built; it does not name its candidates")
    else:
        say(f"{opened.path}: each of its {functions} is one of its candidates, which were built as the same bytes")
