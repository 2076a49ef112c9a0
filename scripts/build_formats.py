"""Build one archive of models in every format that each target serves, with no GPU, and say what it takes: functions
and bytes by target, formats, and seconds.

A format is an element type and a scaling that `aot manifest from-config` takes. A target serves it if it has a kernel
for one of the linear layers that are in it; experts and biases that it has none for are left out, as in any build.
The cache is empty at first, unless `--cache` names one.

    python scripts/build_formats.py llama-3.1-8b.json gpt-oss-120b.json -o build/formats.aot --out build/formats.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from report import ROOT, ends, out_argument, version, write

from aot.inspect.info import info
from aot.problem import manifest as manifests
from aot.problem.manifest import Manifest, ManifestError
from aot.problem.model_config import Wanted, manifest_from_config
from aot.problem.models.config import load_config
from aot.search.unserved import variants
from runtime.container.archive import Archive
from runtime.numbers.products import scalings_of
from runtime.numbers.scaling import SCALINGS

TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


class Format(NamedTuple):
    """What linear layers are computed in: as `--dtype` and `--scaling` of `aot manifest from-config`."""

    dtype: str
    scaling: str


def formats() -> list[Format]:
    """Every element type of activations with every scaling of its products, weights of other types among them."""
    found = [Format("bf16", "none"), Format("f16", "none")]
    found += [Format(dtype, s) for dtype in ("e4m3", "e2m1") for s in scalings_of(dtype) if s != "none"]
    return found + [Format("bf16", word) for word, scaling in SCALINGS.items() if scaling.of_b]


def manifest_of(path: Path, of: Format, tokens: tuple[int, ...]) -> Manifest | None:
    """A model in a format, for the targets that serve it; None where none does. Experts, which have fewer scalings,
    are in it where they can be."""
    name = "-".join(word for word in (path.stem, *of) if word != "none")
    for experts in (True, False):
        found = [target for target in TARGETS if _serves(_made(path, of, tokens, name, experts, [target]), target, of)]
        if found:
            return _made(path, of, tokens, name, experts, found)
    return None


def _made(
    path: Path, of: Format, tokens: tuple[int, ...], name: str, experts: bool, targets: list[str]
) -> Manifest | None:
    wanted = Wanted(1, tokens, targets, of.dtype, of.scaling, experts=experts, quantise=False)
    try:
        return manifest_from_config(load_config(path), wanted, source=path.name, model=name)
    except ManifestError:  # the format is not for the model, or the target has no kernels
        return None


def _serves(made: Manifest | None, target: str, of: Format) -> bool:
    return made is not None and any(
        gemm.signature.scaling == of.scaling and variants(target, gemm.signature) for gemm in made.gemms
    )


def by_target(archive: Path) -> dict[str, dict[str, int]]:
    """Functions and layers, and bytes before compression, of each target."""
    with Archive.open(archive) as opened:
        found = info(opened)["targets"]
    return {
        row["target"]: {"functions": row["functions"], "entries": row["entries"]["ranked"], "raw_bytes": row["bytes"]}
        for row in found
    }


def built(paths: list[Path], output: Path, options: list[str]) -> dict[str, Any]:
    """Run `aot build`; what it says, and its seconds."""
    command = [sys.executable, "-m", "aot", "build", *map(str, paths), "-o", str(output), *options]
    before, start = os.times(), time.monotonic()
    done = subprocess.run(
        [*command, "--no-tune", "--force", "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if not done.stdout:
        raise SystemExit(done.returncode)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return json.loads(done.stdout) | {"seconds": round(time.monotonic() - start, 1), "cpu_seconds": round(spent, 1)}


def _lines(found: list[tuple[Path, Format, Manifest]]) -> Iterator[str]:
    for path, of, made in found:
        yield f"{path.stem:16s} {of.dtype:5s} {of.scaling:14s} {', '.join(made.targets)}"


def _by_model(found: list[tuple[Path, Format, Manifest]]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for path, of, made in found:
        rows.setdefault(path.stem, []).append(f"{of.dtype} {of.scaling}: {' '.join(made.targets)}")
    return rows


def main() -> int:
    """Build, print what it took, and write that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+", metavar="CONFIG", help="config.json of a model")
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096")
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--cache", type=Path, help="default: an empty one")
    parser.add_argument("-o", "--output", type=Path, required=True)
    out_argument(parser)
    options = parser.parse_args()
    tokens = tuple(int(m) for m in options.tokens.split(","))
    made = [(path, of, manifest_of(path, of, tokens)) for path in options.configs for of in formats()]
    found = [(path, of, manifest) for path, of, manifest in made if manifest is not None]
    print("\n".join(_lines(found)))
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch) / f"{manifest.model}.yaml" for _, _, manifest in found]
        for path, (_, _, manifest) in zip(paths, found, strict=True):
            path.write_text(manifests.dump(manifest))
        cache = options.cache or Path(scratch) / "cache"
        summary = built(paths, options.output, ["--candidates", str(options.candidates), "--cache", str(cache)])
    targets = by_target(options.output)
    size = options.output.stat().st_size
    for target, row in targets.items():
        print(f"{target:8s} {row['functions']:6d} functions {row['entries']:6d} entries {row['raw_bytes']:12,d} bytes")
    print(f"{size:,} bytes in {summary['seconds']:.0f} s, {summary['cpu_seconds']:.0f} s of processors")
    environment = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "dsl": version("nvidia-cutlass-dsl")}
    write(
        options.out,
        environment,
        formats=_by_model(found),
        targets=targets,
        bytes=size,
        **{field: summary[field] for field in ("seconds", "cpu_seconds")},
    )
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
