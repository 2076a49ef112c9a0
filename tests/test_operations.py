"""Operations besides GEMM: a table each, found by name, called and preloaded like GEMM's; others bring their own."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aot.pack.write import Package
from aot.plan import plan
from aot.problem import manifest
from aot.search.operation import GROUP, BuildingError, building
from runtime import ArgumentError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.program import operation as operations
from runtime.program.operation import operation
from runtime.rmsnorm import RMSNORM, Signature
from runtime.serve.function import Unfit
from runtime.tables.dispatch import Dispatch

from .command_line import COMMAND, ROOT, Run
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, cubin, entry, write_archive

RECORDS = Path(__file__).parent / "data" / "records.json"
OF = Signature("bf16", "bf16", "bf16", 4096)
OTHER = replace(OF, n=128)
KIND = Gpu("made up", 132, 4800)
# An operation of another package: row-wise scaling, y[m, n] = x[m, n] * weight[n], with RMSNorm's tensors and no eps.
OUTSIDE = """
import dataclasses
from runtime.program.operation import Asked
from runtime.rmsnorm import RmsNorm, Signature

class ScaledSignature(Signature):
    operation = "row_scale"

class RowScale(RmsNorm):
    name = "row_scale"
    def read(self, obj):
        return ScaledSignature(**dataclasses.asdict(super().read(obj)))
    def ask(self, view, x, weight, *, out, eps=0.0):
        asked = super().ask(view, x, weight, out=out, eps=eps)
        return asked._replace(signature=self.read(asked.signature.to_json()))

ROW_SCALE = RowScale()
"""
# And kernels for it: those of RMSNorm, which will do where nothing is computed.
PROVIDER = """
import dataclasses
from aot.search.legal import legal_functions
from aot.search.variants import Family, choices

class RowScales:
    name = "row_scales"
    families = {"row": Family("row_scale", ("sm_90a",), (("bf16",) * 3,), {"threads": (128,)}, batched=(False,))}
    def variants(self, target, signature):
        return []
    def functions(self, target):
        return legal_functions(self.name, target)
    def source_digest(self, family):
        return "0" * 64
    def build(self, variant):
        from aot.providers import own
        return own._rmsnorm(dataclasses.replace(variant, config=choices(threads=128, overlap=False)))
"""

# And how it is built, in another way than is usual.
BUILDING = """
from aot.search.operation import Building, Shortlist

class Scalings(Building):
    def shortlist(self, wanted, target, limit):
        found = super().shortlist(wanted, target, limit).by_signature
        return Shortlist({s: by_tokens[-1:] for s, by_tokens in found.items()}, "the largest M alone")

ROW_SCALE = Scalings("row_scale", "scalings")
"""


def norm_record(name: str) -> dict[str, Any]:
    """The record of the RMSNorm of this project, under another name."""
    found: dict[str, Any] = next(r for r in json.loads(RECORDS.read_text()) if "rmsnorm" in r["name"])
    kernels = [found["kernels"][0] | {"symbol": f"kernel_{name}"}]
    return found | {"name": name, "kernels": kernels, "cubin": hashlib.sha256(cubin(name)).hexdigest()}


def norm_entry(ranges: list[tuple[int | None, str]], of: Signature = OF, state: str = "tuned") -> dict[str, Any]:
    return entry(of.to_json(), ranges, state=state)


def write(path: Path, name: str = "rmsnorm") -> RecordingDriver:
    records = [norm_record("narrow"), norm_record("wide")]
    rows = [norm_entry([(8, "narrow"), (None, "wide")])]
    return RecordingDriver(kernels=write_archive(path, records, rows, name))


@pytest.fixture
def driver(tmp_path: Path, torch: FakeTorch) -> RecordingDriver:
    return write(tmp_path / "norms.aot")


@pytest.fixture
def library(tmp_path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(tmp_path / "norms.aot"), driver)


def tensors(m: int, n: int = 4096) -> tuple[FakeTensor, FakeTensor, FakeTensor]:
    return FakeTensor((m, n)), FakeTensor((n,)), FakeTensor((m, n))


def test_call_launches_what_the_table_has_for_the_rows_at_hand(library: Library, driver: RecordingDriver) -> None:
    for m, symbol in ((8, "kernel_narrow"), (9, "kernel_wide")):
        x, weight, y = tensors(m)
        assert library.call("rmsnorm", x, weight, out=y, eps=0.5) is y
        launch = driver.launches[-1]
        assert launch.symbol == symbol
        assert launch.grid[0] == m
        pointers = [struct.unpack_from("<Q", p)[0] for p in launch.parameters[:3]]
        assert pointers == [t.data_ptr() for t in (x, weight, y)]
        assert struct.unpack("<f", launch.parameters[3]) == (0.5,)
    assert library.stats().launches_by_function == {"narrow": 1, "wide": 1}


def test_call_flattens_rows_and_allocates_like_x(library: Library, driver: RecordingDriver) -> None:
    x, weight = FakeTensor((2, 3, 4096)), FakeTensor((4096,))
    found = library.call("rmsnorm", x, weight)
    assert found.shape == x.shape
    assert driver.launches[-1].grid[0] == 6


def test_call_of_no_rows_launches_nothing(library: Library, driver: RecordingDriver) -> None:
    x, weight, y = tensors(0)
    assert library.call("rmsnorm", x, weight, out=y) is y
    assert not driver.launches


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": FakeTensor((8,))}, r"rmsnorm takes x \(..., N\), weight \(N\)"),
        ({"out": FakeTensor((8, 4096))}, "rmsnorm takes x"),
        ({"out": None, "x": object()}, "out is needed"),
    ],
)
def test_call_refuses_tensors_that_do_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    x, weight, y = tensors(4)
    given = {"x": x, "weight": weight, "out": y} | change
    with pytest.raises(ArgumentError, match=match):
        library.call("rmsnorm", given["x"], given["weight"], out=given["out"])


def test_call_refuses_memory_that_is_partly_shared(library: Library, driver: RecordingDriver) -> None:
    x, weight, _ = tensors(4)
    library.call("rmsnorm", x, weight, out=x)
    shifted = FakeTensor((4, 4096), pointer=x.data_ptr() + 4096)
    with pytest.raises(ArgumentError, match="shares memory"):
        library.call("rmsnorm", x, weight, out=shifted)
    assert len(driver.launches) == 1


def test_miss_names_the_nearest_signature(library: Library) -> None:
    x, weight, y = tensors(4, 2048)
    with pytest.raises(KernelMiss, match=r"no kernel for bf16_bf16_bf16_rmsnorm_n2048 .*(\n.*)*N is 4096, wanted 2048"):
        library.call("rmsnorm", x, weight, out=y)
    assert library.stats().refusals[0].signature == "bf16_bf16_bf16_rmsnorm_n2048"


def test_preload_loads_the_functions_of_every_operation(library: Library, driver: RecordingDriver) -> None:
    assert set(library.preload([1, 16])) == {"narrow", "wide"}
    assert library.preload(only=[OF.key()]) == ("narrow", "wide")
    with pytest.raises(KernelMiss, match="cannot preload bf16_bf16_bf16_rmsnorm_n8"):
        library.preload(only=["bf16_bf16_bf16_rmsnorm_n8"])


def test_preload_plans_calls_at_the_rows_it_is_given(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.preload([1, 16])
    made = library.stats().plans_made
    x, weight, y = tensors(16)
    library.call("rmsnorm", x, weight, out=y)
    assert library.stats().plans_made == made
    library.preload([16])
    assert library.stats().plans_made == made
    for change in ({"eps": 1e-5}, {"m": 17}):
        x, weight, y = tensors(int(change.pop("m", 16)))
        library.call("rmsnorm", x, weight, out=y, **change)
        made += 1
        assert library.stats().plans_made == made, "which nobody prepared"


def test_preload_plans_what_serves_where_the_best_cannot(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = library.functions["wide"]
    monkeypatch.setattr(wide, "_evaluate", lambda values: (_ for _ in ()).throw(Unfit("too large")))
    assert library.preload([16]) == ("narrow", "wide")
    made = library.stats().plans_made
    x, weight, y = tensors(16)
    library.call("rmsnorm", x, weight, out=y)
    assert library.stats().plans_made == made
    assert library.stats().launches_by_function == {"narrow": 1}


def test_unknown_operation_is_refused_by_name(library: Library) -> None:
    with pytest.raises(ArgumentError, match="unknown operation 'softmax'; the operations are gemm, rmsnorm"):
        library.call("softmax", *tensors(4))


def test_arguments_that_an_operation_does_not_take_are_told(library: Library) -> None:
    x, weight, y = tensors(4)
    with pytest.raises(ArgumentError, match="rmsnorm: missing a required argument: 'weight'"):
        library.call("rmsnorm", x)
    with pytest.raises(ArgumentError, match="rmsnorm: got an unexpected keyword argument 'epsilon'"):
        library.call("rmsnorm", x, weight, out=y, epsilon=1e-5)


def test_entry_is_found_by_its_key(library: Library) -> None:
    assert library.entry(OF.key()).best(8) == library.entry(OF).best(8) == "narrow"
    with pytest.raises(ArgumentError, match="signature must be one or its key"):
        library.entry("bf16_rmsnorm")


def test_gemm_is_called_by_its_own_method(library: Library) -> None:
    with pytest.raises(ArgumentError, match=r"gemm is not called by its name; Library\.gemm is the way"):
        library.call("gemm", *tensors(4))


def test_key_of_a_signature_is_read_back_and_no_other_word() -> None:
    assert RMSNORM.of_key(OF.key()) == OF
    assert RMSNORM.read(OF.to_json()) == OF
    for word in ("bf16_bf16_bf16_rmsnorm_n0", "bf16_bf16_bf17_rmsnorm_n8", "bf16_bf16_bf16_rmsnorm_n08", ""):
        assert RMSNORM.of_key(word) is None


@pytest.mark.parametrize("change", [{"n": 0}, {"x": "bf17"}, {"more": 1}])
def test_malformed_signatures_are_refused_where_the_table_is_read(change: dict[str, Any]) -> None:
    row = norm_entry([(None, "f")])
    row["signature"] = row["signature"] | change
    row["gpu"] = None
    with pytest.raises(RecordError, match="signature"):
        Dispatch.from_json({"schema": 1, "entries": [row]}, RMSNORM)


# What may name an operation: operations, what makes kernels of them, the lists of operations, the bindings to torch and
# vLLM, whose operator `gemm` is, GEMM's planned calls, and what a variant is of unless it says otherwise.
NAMING = (
    *("runtime/gemm/", "runtime/rmsnorm.py", "aot/search/gemm.py", "aot/search/rmsnorm.py"),
    *("aot/tune/gemm/", "aot/tune/rmsnorm/", "aot/kernels/", "aot/providers/"),
    *("runtime/program/operation.py", "aot/search/operation.py", "aot/tune/operation.py"),
    *("runtime/torch/", "runtime/vllm/", "runtime/serve/plans.py", "aot/search/variants.py"),
)


def names_an_operation(node: ast.AST) -> bool:
    """Whether it is the name of one as a value, or imports one."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in {name.upper() for name in operations._OWN} for alias in node.names)
    return isinstance(node, ast.Constant) and node.value in operations._OWN


def test_no_other_module_names_an_operation() -> None:
    paths = [p.relative_to(ROOT) for room in ("aot", "runtime") for p in sorted((ROOT / room).rglob("*.py"))]
    others = [path for path in paths if not path.as_posix().startswith(NAMING)]
    found = {
        p: [getattr(n, "lineno", 0) for n in ast.walk(ast.parse((ROOT / p).read_text())) if names_an_operation(n)]
        for p in others
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that brings an operation, on the path."""
    info = tmp_path / "site" / "row_scale-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: row-scale\nVersion: 1\n")
    points = f"[{operations.GROUP}]\nrow_scale = row_scale_of_another:ROW_SCALE\n"
    points += "[cute_aot.providers]\nrow_scales = row_scales_of_another:RowScales\n"
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "site" / "row_scale_of_another.py").write_text(OUTSIDE)
    (tmp_path / "site" / "row_scales_of_another.py").write_text(PROVIDER)
    monkeypatch.syspath_prepend(tmp_path / "site")
    operations._found.cache_clear()
    building.cache_clear()
    yield
    operations._found.cache_clear()
    building.cache_clear()
    for name in ("row_scale_of_another", "row_scales_of_another", "row_scale_building"):
        sys.modules.pop(name, None)


def tell_building(site: Path, code: str) -> None:
    """Let the distribution of `outside` say how its operation is built too."""
    (site / "row_scale_building.py").write_text(code)
    with (site / "row_scale-1.dist-info" / "entry_points.txt").open("a") as file:
        file.write(f"[{GROUP}]\nrow_scale = row_scale_building:ROW_SCALE\n")
    building.cache_clear()


@pytest.mark.usefixtures("outside")
def test_an_operation_of_another_package_is_served_like_those_here(tmp_path: Path, torch: FakeTorch) -> None:
    driver = write(tmp_path / "scaled.aot", "row_scale")
    library = Library(Archive.open(tmp_path / "scaled.aot"), driver)
    assert operation("row_scale").name == "row_scale"
    assert set(library.preload()) == {"narrow", "wide"}
    x, weight, y = tensors(64)
    library.call("row_scale", x, weight, out=y)
    assert driver.launches[-1].symbol == "kernel_wide"


@pytest.mark.usefixtures("outside")
def test_an_operation_whose_package_is_broken_says_so(tmp_path: Path) -> None:
    (tmp_path / "site" / "row_scale_of_another.py").write_text("import nothing_of_this_name")
    with pytest.raises(ArgumentError, match=r"operation row_scale: .*cannot be imported .*nothing_of_this_name"):
        operation("row_scale")


@pytest.mark.usefixtures("outside")
def test_what_is_no_operation_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "site" / "row_scale_of_another.py").write_text("from json import dumps as ROW_SCALE")
    with pytest.raises(ArgumentError, match=r"row_scale_of_another:ROW_SCALE is no operation: it lacks name, read"):
        operation("row_scale")


@pytest.mark.usefixtures("outside")
def test_one_name_for_two_packages_operations_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "site" / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text(f"[{operations.GROUP}]\nrow_scale = other:ROW_SCALE\n")
    with pytest.raises(ArgumentError, match=r"row_scale_of_another:ROW_SCALE.* have this name; uninstall all but one"):
        operation("row_scale")


def test_a_table_of_an_operation_that_is_not_here_is_left_alone(tmp_path: Path, torch: FakeTorch) -> None:
    driver = write(tmp_path / "later.aot", "of_a_later_version")
    library = Library(Archive.open(tmp_path / "later.aot"), driver)
    assert "narrow" in library.functions
    with pytest.raises(ArgumentError, match="unknown operation 'of_a_later_version'"):
        library.call("of_a_later_version", *tensors(4))


# --- from a manifest ---

MANIFEST = """
format: 1
model: norms
source: made up
tokens: [1, 64]
targets: [sm_90a]
operations:
  rmsnorm:
    - {name: input_norm, x: bf16, weight: bf16, y: bf16, n: 4096}
    - {name: q_norm, x: f16, weight: f16, y: f16, n: 128, tokens: [1, 32]}
"""


def test_extents_of_other_operations_are_those_that_the_operation_takes() -> None:
    most = 2**31 - 1
    (norm, _) = manifest.loads(MANIFEST.replace("n: 4096", f"n: {most}")).uses
    assert norm.signature == replace(OF, n=most) == operation("rmsnorm").read(norm.signature.to_json())
    with pytest.raises(manifest.ManifestError, match=f"must be an integer from 1 to {most}, found {most + 1}"):
        manifest.loads(MANIFEST.replace("n: 4096", f"n: {most + 1}"))


def test_manifest_with_other_operations_is_read_back() -> None:
    found = manifest.loads(MANIFEST)
    assert [(u.name, u.signature, u.tokens) for u in found.uses] == [
        ("input_norm", OF, (1, 64)),
        ("q_norm", Signature("f16", "f16", "f16", 128), (1, 32)),
    ]
    assert found.gemms == ()
    assert manifest.loads(manifest.dump(found)) == found


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("rmsnorm:", "softmax:", r":8: field 'operations.softmax': unknown; .*known: rmsnorm"),
        ("rmsnorm:", "gemm:", r"field 'operations.gemm': unknown"),
        ("n: 4096", "n: 0", r":9: field 'operations.rmsnorm\[0\].n': must be an integer from 1"),
        ("x: bf16", "x: bf17", r":9: field 'operations.rmsnorm\[0\]': .*unknown element type 'bf17'"),
        (", n: 4096", "", r":9: field 'operations.rmsnorm\[0\].n': missing; add `n:`"),
        ("weight: bf16", "wieght: bf16", r":9: .*rmsnorm\[0\].wieght': unknown; did you mean 'weight'\? known: name"),
        ("tokens: [1, 32]", "token: [1]", r":10: .*rmsnorm\[1\].token': unknown; did you mean 'tokens'\?"),
        ("name: q_norm", "name: input_norm", r":10: .*rmsnorm\[1\].name': 'input_norm' is already taken on line 9"),
        (
            "operations:",
            "gemms: [{name: q_norm, n: 64, k: 64, dtypes: {a: bf16, b: bf16, d: bf16}}]\noperations:",
            r":11: field 'operations.rmsnorm\[1\].name': 'q_norm' is already taken on line 7; give each its own name",
        ),
        ("name: input_norm, ", "", r"field 'operations.rmsnorm\[0\].name': missing"),
        ("operations:", "gemms:", "must be a list"),
    ],
)
def test_mistakes_in_other_operations_are_told_with_their_line(before: str, after: str, match: str) -> None:
    with pytest.raises(manifest.ManifestError, match=match):
        manifest.loads(MANIFEST.replace(before, after, 1))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of the manifest."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    folder = tmp_path_factory.mktemp("norms")
    (folder / "norms.yaml").write_text(MANIFEST)
    command = [*COMMAND, "build", "norms.yaml", "-o", "norms.aot", "--cache", "cache", "--no-tune"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "norms.aot"


def test_what_a_manifest_asks_of_an_operation_is_built_listed_and_served(
    run: Run, built: Path, torch: FakeTorch
) -> None:
    listed = run("ls", built)
    assert listed.status == 0
    assert listed.out.split()[:3] == ["signature", "norms", "target"]
    assert "input_norm  sm_90a  ranked" in listed.out
    assert run("verify", built).status == 0
    assert run("show", built, "input_norm").out.startswith(f"{OF.key()} on sm_90a: ranked\nnorms: input_norm\ntakes: ")
    assert "takes: x bf16 (M, 4096), weight bf16 (4096), y bf16 (M, 4096)" in run("show", built, "input_norm").out
    with Archive.open(built) as archive:
        kernels = {}
        for name in archive.functions:
            (launch,), (kernel,) = archive.record(name)["program"]["launches"], archive.record(name)["kernels"]
            kernels[archive.cubin(name)] = {kernel["symbol"]: tuple(p["size"] for p in launch["parameters"])}
        driver = RecordingDriver(kernels=kernels)
        library = Library(archive, driver)
        x, weight, y = tensors(64)
        assert library.call("rmsnorm", x, weight, out=y) is y
        assert driver.launches[-1].grid == (64, 1, 1)
        library.close()


def test_a_base_keeps_its_entries_of_other_operations(built: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(MANIFEST.replace("4096", "8192").replace("q_norm", "k_norm"))
    arguments = ("--base", built, "-o", tmp_path / "both.aot", "--cache", built.parent / "cache", "--no-tune")
    result = run("build", tmp_path / "more.yaml", *arguments)
    assert result.status == 0, result.err
    with Archive.open(tmp_path / "both.aot") as archive:
        table = Dispatch.from_json(archive.table("rmsnorm"), RMSNORM, archive.functions.targets_by_name())
    assert {entry.signature.n for entry in table.entries} == {128, 4096, 8192}


def test_forms_are_of_gemms_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "norms.yaml").write_text(MANIFEST)
    result = run("build", tmp_path / "norms.yaml", "--universal", "-o", tmp_path / "x.aot")
    assert result.status == 2
    assert "manifest of norms: forms are of gemms, and it asks for rmsnorm too; build these without" in result.err


def test_a_base_whose_records_this_version_does_not_read_is_refused(built: Path, run: Run, tmp_path: Path) -> None:
    package = Package()
    package.add_function(norm_record("old") | {"schema": 2}, cubin("old"))
    package.write(tmp_path / "old.aot")
    (tmp_path / "norms.yaml").write_text(MANIFEST)
    arguments = ("--base", tmp_path / "old.aot", "--cache", built.parent / "cache", "--no-tune")
    result = run("build", tmp_path / "norms.yaml", "-o", tmp_path / "x.aot", *arguments)
    assert result.status == 2
    assert f"{tmp_path / 'old.aot'}: " in result.err
    assert "reads schema 1, found schema 2" in result.err


def test_a_table_of_another_schema_is_refused_with_the_name_of_its_file(run: Run, tmp_path: Path) -> None:
    package = Package()
    package.set_table("gemm", {"schema": 2, "entries": []})
    package.write(tmp_path / "later.aot")
    assert run("ls", tmp_path / "later.aot").err.startswith(f"error: {tmp_path / 'later.aot'}: gemm table")


def test_extents_that_no_kernel_takes_are_told(built: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(MANIFEST.replace("n: 4096", "n: 4100"))
    result = run(
        "build", tmp_path / "odd.yaml", "-o", tmp_path / "odd.aot", "--cache", built.parent / "cache", "--no-tune"
    )
    assert result.status == 1
    assert (
        "bf16_bf16_bf16_rmsnorm_n4100 on sm_90a: no kernel takes it: x.extent[1] must be a multiple of 8, found 4100"
        in result.err
    )


def test_a_build_of_which_no_kernel_takes_anything_is_refused_and_writes_nothing(
    built: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "odd.yaml").write_text(MANIFEST.replace("n: 4096", "n: 4097").replace("n: 128", "n: 129"))
    odd = ("build", tmp_path / "odd.yaml", "-o", tmp_path / "odd.aot", "--cache", built.parent / "cache", "--no-tune")
    result = run(*odd)
    assert (result.status, result.out) == (2, "")
    assert (
        f"error: {tmp_path / 'odd.yaml'}:9: input_norm: bf16_bf16_bf16_rmsnorm_n4097 on sm_90a: no kernel takes it: "
        "x.extent[1] must be a multiple of 8, found 4097; nor is there a kernel for the other 1" in result.err
    )
    assert not (tmp_path / "odd.aot").exists()
    assert run(*odd, "--function", "rmsnorm").status == 1, "its functions can be called by name"
    assert (tmp_path / "odd.aot").exists()


@pytest.mark.usefixtures("outside")
def test_an_operation_of_another_package_is_built_as_is_usual_unless_it_says_otherwise(tmp_path: Path) -> None:
    asked = [manifest.loads(MANIFEST.replace("rmsnorm:", "row_scale:"))]
    usual = plan(asked)
    name = "row_scales.row.bf16_bf16_bf16_f32.threads128.sm_90a"
    assert [(m, [v.name() for v in variants]) for m, variants in usual.problems[0].by_tokens] == [
        (1, [name]),
        (64, [name]),
    ]
    assert (usual.ranking, building("row_scale").plural) == ({}, "row_scales")
    tell_building(tmp_path / "site", BUILDING)
    found = plan(asked)
    assert [m for m, _ in found.problems[0].by_tokens] == [64]
    assert (found.ranking, building("row_scale").plural) == ({"sm_90a": "the largest M alone"}, "scalings")


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("code", "points", "match"),
    [
        ("import nothing_of_this_name", "", "cannot be imported .*nothing_of_this_name.*; install it again"),
        ("ROW_SCALE = 5", "", "row_scale_building:ROW_SCALE is no aot.search.operation.Building of that name"),
        (BUILDING.replace('Scalings("row_scale"', 'Scalings("rows"'), "", "is no .*Building of that name; mend it"),
        (BUILDING, "\nrow_scale=other:X", "say how to build it; uninstall all but one"),
    ],
)
def test_what_does_not_say_how_an_operation_is_built_is_refused(
    tmp_path: Path, code: str, points: str, match: str
) -> None:
    tell_building(tmp_path / "site", code)
    if points:
        other = tmp_path / "site" / "other-1.dist-info"
        other.mkdir()
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
        (other / "entry_points.txt").write_text(f"[{GROUP}]{points}\n")
    with pytest.raises(BuildingError, match=f"operation row_scale: .*{match}"):
        plan([manifest.loads(MANIFEST.replace("rmsnorm:", "row_scale:"))])


@pytest.mark.usefixtures("outside")
def test_a_manifest_may_name_an_operation_of_another_package() -> None:
    found = manifest.loads(MANIFEST.replace("rmsnorm:", "row_scale:"))
    assert {use.signature.operation for use in found.uses} == {"row_scale"}


@pytest.mark.usefixtures("outside")
def test_an_operation_and_kernels_of_another_package_are_built_and_called(tmp_path: Path, torch: FakeTorch) -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    lines = [line for line in MANIFEST.splitlines() if "q_norm" not in line]
    (tmp_path / "scales.yaml").write_text("\n".join(lines).replace("rmsnorm:", "row_scale:"))
    command = [*COMMAND, "build", "scales.yaml", "-o", "scales.aot", "--cache", "cache", "--no-tune"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with Archive.open(tmp_path / "scales.aot") as archive:
        (name,) = archive.functions
        assert name == "row_scales.row.bf16_bf16_bf16_f32.threads128.sm_90a"
        (launch,), (kernel,) = archive.record(name)["program"]["launches"], archive.record(name)["kernels"]
        sizes = tuple(p["size"] for p in launch["parameters"])
        driver = RecordingDriver(kernels={archive.cubin(name): {kernel["symbol"]: sizes}})
        library = Library(archive, driver)
        x, weight, y = tensors(64)
        library.call("row_scale", x, weight, out=y)
        assert driver.launches[-1].grid == (64, 1, 1)
        library.close()


def test_an_entry_of_any_operation_that_was_never_tuned_gives_way_to_tuned_ones(run: Run, tmp_path: Path) -> None:
    ranked = norm_entry([(None, "narrow")], state="ranked")
    rows = [entry(OF.to_json(), [(None, "wide")], gpu=KIND), ranked, norm_entry([(None, "narrow")], OTHER, "ranked")]
    write_archive(tmp_path / "kinds.aot", [norm_record("narrow"), norm_record("wide")], rows, "rmsnorm")
    found = json.loads(run("ls", tmp_path / "kinds.aot", "--json").out)["entries"]
    tuned: dict[str, Any] = {"state": "tuned", "form": None, "checked_on": []}
    assert [(e["operation"], e["instead"]) for e in found] == [("rmsnorm", None), ("rmsnorm", tuned), ("rmsnorm", None)]
    assert "gives way to the entries that were tuned" in run("ls", tmp_path / "kinds.aot").out


def test_launches_of_every_operation_are_evaluated_at_what_its_entries_serve(run: Run, tmp_path: Path) -> None:
    """The extents of a signature, not any: of N = 4100 the record allows none."""
    rows = [norm_entry([(None, "narrow")], replace(OF, n=4100))]
    write_archive(tmp_path / "odd.aot", [norm_record("narrow")], rows, "rmsnorm")
    said = run("verify", tmp_path / "odd.aot").out
    assert (
        "it refuses every shape of bf16_bf16_bf16_rmsnorm_n4100, first 1 rows: x.extent[1] must be a multiple" in said
    )


def test_each_function_with_numbers_is_held_against_the_signature(tmp_path: Path, torch: FakeTorch, run: Run) -> None:
    """Though one before it was right: they have no tensors alone to be known by."""
    wide = norm_record("wide")
    wide["arguments"] = [a | {"dtype": "f16"} if a["kind"] == "tensor" else a for a in wide["arguments"]]
    rows = [norm_entry([(8, "narrow"), (None, "wide")])]
    path = tmp_path / "mixed.aot"
    driver = RecordingDriver(kernels=write_archive(path, [norm_record("narrow"), wide], rows, "rmsnorm"))
    assert "function wide takes x as f16, not bf16" in run("verify", path).out
    library = Library(Archive.open(path), driver)
    library.call("rmsnorm", *tensors(8)[:2], out=tensors(8)[2])
    with pytest.raises(RecordError, match="has wide for bf16_bf16_bf16_rmsnorm_n4096, but it takes x as f16, not bf16"):
        library.call("rmsnorm", *tensors(9)[:2], out=tensors(9)[2])
