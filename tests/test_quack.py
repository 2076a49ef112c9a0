"""quack's RMSNorm and cross-entropy, by examples/quack/spec.py: built here, their launch programs held against the
compiler's host code, and with `-m gpu --functions ARCHIVE` run and checked from an archive without the DSL."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .command_line import ALONE, ROOT, Run

SPEC = ROOT / "examples" / "quack" / "spec.py"
MISSING = [name for name in ("cutlass", "quack", "triton") if importlib.util.find_spec(name) is None]
needs_quack = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed; quack-kernels needs triton"
)
NAMES = [
    "quack.cross_entropy.bf16.n128256.sm_90a",
    "quack.cross_entropy.bf16.n32000.sm_90a",
    "quack.rmsnorm.bf16.n4096.sm_90a",
    "quack.rmsnorm.bf16.n8192.sm_90a",
]


@needs_quack
def test_functions_of_quack_are_built_shown_and_verified(run: Run, tmp_path: Path) -> None:
    out, cache = tmp_path / "quack.aot", tmp_path / "cache"
    arguments = ["--spec", SPEC, "-o", out, "--target", "sm_90a", "--cache", cache, "--no-tune", *ALONE]
    assert run("build", "--function", "quack.rmsnorm:RMSNorm", *arguments).status == 0
    assert [f["name"] for f in json.loads(run("ls", out, "--json").out)["functions"]] == NAMES[2:]
    done = json.loads(run("build", *arguments, "--force", "--json").out)
    assert (done["functions"], done["compiled"], done["cached"]) == (4, 2, 2)
    assert [f["name"] for f in json.loads(run("ls", out, "--json").out)["functions"]] == NAMES
    shown = json.loads(run("show", out, NAMES[0], "--json").out)["function"]
    assert [a["name"] for a in shown["arguments"]] == ["logits", "target", "loss", "lse", "ignored", "stream"]
    assert shown["launches"][0]["attributes"]["cluster"] == [1, 8, 1]
    assert run("verify", out).status == 0


@needs_quack
@pytest.mark.parametrize(
    "target", ["sm_90a", *(pytest.param(t, marks=pytest.mark.long) for t in ("sm_100a", "sm_120a"))]
)
def test_launch_programs_of_quack_equal_the_compilers_host_code(target: str) -> None:
    command = [sys.executable, "-m", "tests.oracle", target, "--spec", str(SPEC), "--cases", "200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("ok     200 cases  quack.") == len(NAMES)


@needs_quack
@pytest.mark.long
def test_the_oracle_notices_a_changed_program_of_quack() -> None:
    command = [sys.executable, "-m", "tests.oracle", "sm_90a", "--spec", str(SPEC), "--mutate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("changed constants noticed") == 2


def test_references_say_what_the_functions_compute(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from aot.providers import spec_file
    from aot.tune import function_check

    (tmp_path / "spec.py").write_text(SPEC.read_text() + "functions = [rmsnorm(64), cross_entropy(100)]\n")
    spec = spec_file.load(tmp_path / "spec.py")

    def norm(x: Any, weight: Any, y: Any, eps: float) -> None:
        y.copy_(torch.nn.functional.rms_norm(x.float(), x.shape[1:], weight.float(), eps))

    def entropy(logits: Any, target: Any, loss: Any, lse: Any, ignored: int) -> None:
        lse.copy_(logits.float().logsumexp(1))
        picked = logits.float().gather(1, target[:, None])[:, 0]
        loss.copy_((lse - picked).masked_fill(target == ignored, 0))

    launches: list[Any] = [norm, entropy]
    for function, launch in zip(spec.functions, launches, strict=True):
        found = [function_check.check(spec, function, i, launch, 0, "cpu") for i in range(4)]
        assert found == [None] * 4


@pytest.mark.gpu
def test_functions_of_the_archive_are_right_on_this_gpu(functions_archive: Path, tmp_path: Path) -> None:
    from aot.providers import spec_file
    from aot.tune.functions import check_archive

    report = check_archive(functions_archive, tmp_path / "checked.aot", spec_file.load(SPEC))
    assert report.wrong == {}
    assert sorted(report.right) == NAMES
    assert set(report.right.values()) == {4}


WITHOUT_DSL = """
import sys
sys.modules.update(dict.fromkeys(["cutlass", "quack", "triton"]))
import torch, runtime

library = runtime.load(sys.argv[1])
torch.manual_seed(0)
x = torch.randn(777, 8192, device="cuda", dtype=torch.bfloat16)[:, :4096]
weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
y = torch.empty(777, 4096, device="cuda", dtype=torch.bfloat16)
norm = library.functions["quack.rmsnorm.bf16.n4096.sm_90a"]
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
norm(x, weight, y, 1e-5, stream=stream)
stream.synchronize()
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), 1e-5).to(y.dtype))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    norm(x, weight, y, 1e-5, stream=torch.cuda.current_stream())
y.fill_(float("nan"))
graph.replay()
torch.cuda.synchronize()
assert not y.isnan().any()

logits = torch.randn(333, 128256, device="cuda", dtype=torch.bfloat16)
target = torch.randint(0, 128256, (333,), device="cuda")
target[::7] = -100
loss, lse = torch.empty(333, device="cuda"), torch.empty(333, device="cuda")
library.functions["quack.cross_entropy.bf16.n128256.sm_90a"](logits, target, loss, lse, -100)
wanted = torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")
torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
print("right")
"""


@pytest.mark.gpu
def test_functions_of_the_archive_run_with_the_dsl_absent(functions_archive: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", WITHOUT_DSL, str(functions_archive)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-3000:]
