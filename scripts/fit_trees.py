"""Fit the trees of `aot.search.boosted` to kept times, and say how good choices by them are.

    pip install lightgbm numpy
    python scripts/fit_trees.py benchmarks/{drawn,one_tile,ragged,variants}_*.json.xz benchmarks/unseen_h200.json.xz \
        runtime/universal.aot -o aot/search/boosted.json

What is fitted is the logarithm of measured over estimated time, less its median over the problem's good functions. A
function weighs the less, the further behind the problem's best it is, since only good ones are chosen, and a problem by
the root of their number. One N x K in `boosted.ONE_IN` is left out, and tells how good the trees are. Needs no GPU.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report  # also puts the checkout on the path

from aot.search import boosted
from aot.search.estimates import Estimates
from aot.search.h200 import H200
from aot.search.provider import provider, provider_names
from aot.search.universal import choices_of, form_of
from aot.search.variants import Variant
from aot.tune import times
from runtime.errors import AotError
from runtime.gemm.signature import Signature

try:
    import lightgbm
except ModuleNotFoundError:
    lightgbm = None

TARGET = "sm_90a"
TREES, LEAVES, LEARNING_RATE, LEAST_OF_A_LEAF, SHARE = 200, 63, 0.1, 30, 0.8
_NEAR, _BEHIND = 0.25, 0.15  # logarithms: of good functions, and by which their weight falls to 1/e


class Problem(NamedTuple):
    """The functions that were timed at one M: their features, and the logarithms of measured and of estimated times."""

    signature: Signature
    m: int
    features: np.ndarray
    measured: np.ndarray
    estimated: np.ndarray


def problems(path: Path) -> list[Problem]:
    """The problems in a file of times at which two known functions or more were timed."""
    by_form: dict[Signature, dict[Any, Variant]] = {}
    found = []
    for signature, at in times.load(path, TARGET):
        form = form_of(signature)
        if form not in by_form:
            every = (v for p in provider_names() for v in provider(p).variants(TARGET, signature))
            by_form[form] = {choices_of(v): v for v in every if boosted.is_known(v)}
        timed = [(v, us) for choices, us in at.us.items() if (v := by_form[form].get(choices))]
        if len(timed) < 2:
            continue
        estimated = _estimates(tuple(v for v, _ in timed)).us(signature, at.m)
        rows = [boosted.features(v, signature, at.m, H200) for v, _ in timed]
        found.append(
            Problem(signature, at.m, np.array(rows), np.log([us for _, us in timed]), np.log(np.array(estimated)))
        )
    return found


@lru_cache(64)  # problems of one signature mostly have the same variants
def _estimates(variants: tuple[Variant, ...]) -> Estimates:
    return Estimates(variants)


def fit(known: list[Problem]) -> Any:
    """Trees that give the logarithm of what an estimate is to be multiplied by, as LightGBM has them."""
    targets, weights = [], []
    for of in known:
        behind, ratio = of.measured - of.measured.min(), of.measured - of.estimated
        weight = np.exp(-behind / _BEHIND)
        targets.append(ratio - np.median(ratio[behind < _NEAR]))
        weights.append(weight / math.sqrt(weight.sum()))
    data = lightgbm.Dataset(
        np.concatenate([of.features for of in known]),
        np.concatenate(targets),
        weight=np.concatenate(weights),
        feature_name=list(boosted.FEATURES),
    )
    options = {
        "objective": "l2",
        "num_leaves": LEAVES,
        "learning_rate": LEARNING_RATE,
        "min_data_in_leaf": LEAST_OF_A_LEAF,
        "feature_fraction": SHARE,
        "boost_from_average": False,
        "deterministic": True,
        "seed": 0,
        "verbose": -1,
    }
    return lightgbm.train(options, data, TREES)


def plain(node: dict[str, Any]) -> Any:
    """A tree as `boosted` reads it, of as many digits as tell."""
    if "leaf_value" in node:
        return round(node["leaf_value"], 4)
    sides = plain(node["left_child"]), plain(node["right_child"])
    return [node["split_feature"], float(f"{node['threshold']:.5g}"), *sides]


def behind(of: Problem, trees: Sequence[Any]) -> float:
    """The logarithm of the time of what is chosen over that of the best."""
    by = of.estimated + np.array([boosted.added(row, trees) for row in of.features])
    return float(of.measured[np.argmin(by)] - of.measured.min())


def is_unseen(of: Problem) -> bool:
    return boosted.is_unseen(of.signature.n, of.signature.k)


def main() -> int:
    """Fit, say how good, write."""
    parser = report.options_to_write(__doc__, "the file to write")
    parser.add_argument("times", nargs="+", type=Path)
    options = parser.parse_args()

    def work() -> None:
        if lightgbm is None:
            raise AotError("LightGBM is not installed; run `pip install lightgbm numpy`")
        every = {path: problems(path) for path in options.times}
        booster = fit([p for of in every.values() for p in of if not is_unseen(p)])
        trees = [plain(tree["tree_structure"]) for tree in booster.dump_model()["tree_info"]]
        print(f"{'N x K that were left out':44s} {'problems':>8s} {'estimates':>10s} {'and trees':>10s}")
        for path, of in every.items():
            by_form = defaultdict(list)
            for p in filter(is_unseen, of):
                s = p.signature
                by_form[f"{s.a} {s.scaling} {'gated' if s.parts.gated else ''}"].append(p)
            for form, alike in by_form.items():
                alone, both = (statistics.fmean(behind(p, by) for p in alike) for by in ([], trees))
                print(f"{path.name + ' ' + form:44s} {len(alike):8d} {alone:10.2%} {both:10.2%}")
        found = {
            "features": boosted.FEATURES,
            "one_in": boosted.ONE_IN,
            "times": [path.name for path in options.times],
            "trees": trees,
        }
        options.output.write_text(json.dumps(found, separators=(",", ":")) + "\n")

    return report.ends(work)


if __name__ == "__main__":
    sys.exit(report.ends(main))
