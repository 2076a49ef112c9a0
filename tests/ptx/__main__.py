"""`python -m tests.ptx sm_90a`: variants that are drawn, on the emulated GPU, a line each; exit status 1 where one is
wrong. A process can compile for one target only."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", help="may be repeated; default: all")
    parser.add_argument("--name", action="append", help="variants by name in place of drawn ones; may be repeated")
    parser.add_argument("--case", type=int, action="append", help="by its number; may be repeated; default: all")
    parser.add_argument("--larger", action="store_true", help="larger cases, which take a minute each")
    parser.add_argument("--hostile", action="store_true", help="grouped GEMMs, at ends of groups that are none")
    parser.add_argument("--forget", action="append", help="what kernels are to forget; may be repeated, one at a time")
    options = parser.parse_args()
    os.environ |= {"CUTE_DSL_ARCH": options.target, "CUDA_VISIBLE_DEVICES": ""}
    from . import check

    warnings.filterwarnings("ignore", category=RuntimeWarning)  # infinities are what they are
    every = check.LARGER if options.larger else check.CASES
    cases = tuple(every[i] for i in options.case) if options.case else every
    wrong = 0
    drawn = check.drawn(options.target, random.Random(options.seed), cases)
    for variants, case in check.named(options.name, cases) if options.name else drawn:
        if options.family and variants[0].family not in options.family:
            continue
        variant, lowered = check.lowered_first(variants)
        for forgets in options.forget or [""]:
            begun = time.monotonic()
            try:
                if options.hostile:
                    found = check.check_hostile(variant, lowered, case, seed=options.seed)
                else:
                    found = check.check(variant, lowered, case, seed=options.seed, forgets=forgets)
            except Exception as failure:
                found = f"{type(failure).__name__}: {failure}"
            wrong += isinstance(found, str)
            said = f"ok    {found:.1e}" if isinstance(found, float) else f"FAIL  {found}"
            print(f"{said}  {time.monotonic() - begun:5.1f} s  {variant.name()}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
