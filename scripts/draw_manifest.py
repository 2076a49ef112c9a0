"""Write a manifest of layers of many models, drawn by a seed, for an archive to be tuned with as `aot tune` is.

    python scripts/draw_manifest.py -o build/drawn.yaml
    python scripts/bench_random.py build/drawn.aot --layers build/drawn.yaml

It has every layer of 16 bits of manifests/, and one of each of some models of benchmarks/models.yaml. The seed is the
current commit's hash, or --seed. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import random_cases
import report
from random_cases import MODELS, Layer

from aot.problem import manifest as manifests
from aot.problem.manifest import Gemm, Manifest

TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)  # those of manifests/
_GROUPS = ("16 bits", "16 bits, fused")


def drawn(seed: str, count: int, groups: Sequence[str], layers: Sequence[Layer]) -> list[Layer]:
    """One layer of each of `count` models, none twice; of these `groups`, as `random_cases.group` says them."""
    draw = random_cases.Draw(f"{seed} manifest")
    by_model: dict[str, list[Layer]] = {}
    for layer in sorted(layers, key=lambda layer: layer.signature.key()):
        if random_cases.group(layer.signature) in groups:
            for name in layer.names:
                by_model.setdefault(name.split(":")[0], []).append(layer)
    models, found = sorted(by_model), dict[str, Layer]()
    while models and len(found) < count:
        model = models.pop(draw.below(len(models)))
        left = [layer for layer in by_model[model] if layer.signature.key() not in found]
        if left:
            layer = left[draw.below(len(left))]
            found[layer.signature.key()] = layer
    return list(found.values())


def manifest_of(layers: Sequence[Layer], source: str) -> Manifest:
    """The manifest of such layers for Hopper, each named after the first model that has it."""
    gemms = [
        Gemm(
            layer.names[0].replace(":", "."),
            layer.signature,
            1,
            tuple(m for m in TOKENS if m <= layer.most_tokens),
        )
        for layer in layers
    ]
    return Manifest("drawn", source, TOKENS, ("sm_90a",), tuple(gemms))


def main() -> int:
    """Draw and write."""
    parser = report.options_to_write(__doc__, "the manifest to write")
    parser.add_argument("--seed", help="any text; the current commit's hash")
    parser.add_argument("--models", type=int, default=24, help="models to draw a layer of 16 bits of (24)")
    parser.add_argument("--block", type=int, default=0, help="models to draw a layer of e4m3 with block scales of (0)")
    options = parser.parse_args()

    def work() -> None:
        seed = options.seed or random_cases.seed_of_commit()
        own = {layer.signature for layer in random_cases.load_layers(random_cases.default_paths()[:-1])}
        layers = random_cases.load_layers(random_cases.default_paths())
        mine = [x for x in layers if x.signature in own and random_cases.group(x.signature) in _GROUPS]
        others = [x for x in layers if x.signature not in own]
        mine += drawn(seed, options.models, _GROUPS, others) + drawn(seed, options.block, ("e4m3 block",), others)
        text = manifests.dump(manifest_of(mine, f"Layers of manifests/ and of {MODELS.name}, drawn by {seed}"))
        manifests.write(text, options.output, replace=True)

    return report.ends(work)


if __name__ == "__main__":
    sys.exit(report.ends(main))
