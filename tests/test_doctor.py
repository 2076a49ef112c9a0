"""`aot doctor`, on machines that are made up: what it says of each part, and with which status it ends."""

from __future__ import annotations

import ctypes
import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import runtime
from aot.inspect import doctor, installed, sass
from runtime import native
from runtime.device import libcuda

from .command_line import Run
from .stand_in_cuda import StandInCuda


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the build cache, which nothing has made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cute-aot"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    """A driver with one H200."""
    stand_in = StandInCuda()
    stand_in.answers["cuDeviceGetCount"] = (ctypes.c_int(1), 0)
    monkeypatch.setattr(libcuda, "load", lambda: libcuda.Libcuda(stand_in))
    monkeypatch.setattr(installed, "version", {"torch": "2.13.0"}.get)
    return stand_in


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", "libcuda-of-no-machine.so.1")


def found(part: str, *archives: Path) -> doctor.Finding:
    [finding] = [finding for finding in doctor.examine(archives) if finding.part == part]
    return finding


def test_a_machine_with_no_driver_lacks_one_and_is_not_broken(run: Run, no_driver: None) -> None:
    done = run("doctor")
    assert found("driver").state == doctor.MISSING
    assert (done.status, done.err) == (0, "")


def test_a_driver_that_refuses_is_broken_and_status_1(run: Run, cuda: StandInCuda) -> None:
    cuda.errors["cuInit"] = 803
    done = run("doctor")
    assert (done.status, done.err) == (1, "")
    assert "cuInit failed" in " ".join(done.out.split())


def test_it_names_the_gpu_and_what_runs_on_it(cuda: StandInCuda) -> None:
    assert found("driver").found.endswith("CUDA 12.8")
    assert found("GPU").found == "NVIDIA H200 (132 SMs, 4917 GB/s), sm_90a"


def test_gpus_of_one_kind_are_one_line(cuda: StandInCuda) -> None:
    cuda.answers["cuDeviceGetCount"] = (ctypes.c_int(8), 0)
    assert found("GPU").found.startswith("8 x NVIDIA H200")


def test_it_makes_no_context(cuda: StandInCuda) -> None:
    doctor.examine()
    assert not {"cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"} & {name for name, *_ in cuda.calls}


def test_the_packaged_archive_serves_an_h200(cuda: StandInCuda) -> None:
    archive = found("its archive")
    assert archive.state == doctor.OK
    assert archive.found.endswith("22 forms, sm_90a, serves this GPU")


@pytest.mark.parametrize(("named", "state"), [(True, doctor.BROKEN), (False, doctor.MISSING)])
def test_an_archive_for_other_gpus_is_broken_only_if_it_was_named(named: bool, state: str) -> None:
    blackwell = doctor.Device("NVIDIA B200", (10, 0))
    archive = doctor._archive(runtime.universal(), [blackwell], named)
    assert (archive.state, "NVIDIA B200" in archive.remedy) == (state, True)


def test_an_archive_that_is_damaged_is_broken(run: Run, tmp_path: Path, no_driver: None) -> None:
    damaged = bytearray(runtime.universal().read_bytes())
    damaged[len(damaged) // 2] ^= 1  # in a block of cubins, which listing it does not read
    (tmp_path / "damaged.aot").write_bytes(damaged)
    assert found("archive", tmp_path / "damaged.aot").state == doctor.BROKEN
    assert run("doctor", "--archive", tmp_path / "damaged.aot").status == 1


def test_native_code_of_another_version_is_broken_and_none_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded", False)
    for spec, state in ((SimpleNamespace(origin="old.so"), doctor.BROKEN), (None, doctor.MISSING)):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        assert doctor._native().state == state


def test_a_torch_with_no_cuda_is_broken_only_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", {"torch": "2.13.0+cpu"}.get)
    monkeypatch.setattr(installed, "importable", lambda package: True)
    assert doctor._torch([]).state == doctor.OK
    assert doctor._torch([doctor.Device("NVIDIA H200", (9, 0))]).state == doctor.BROKEN


def test_a_package_without_its_files_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda distribution: "4.8.1")
    monkeypatch.setattr(installed, "importable", lambda package: False)
    assert found("DSL").state == doctor.BROKEN


def test_an_nvdisasm_that_does_not_run_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "nvdisasm", lambda: "/bin/false")
    assert found("nvdisasm").state == doctor.BROKEN


def test_a_cache_that_others_may_write_to_is_broken(cache: Path) -> None:
    assert found("build cache").state == doctor.OK
    cache.mkdir()
    cache.chmod(0o777)
    assert found("build cache").state == doctor.BROKEN


def test_an_extra_lacks_what_is_not_installed_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "orjson>=3.9",
        'torch>=2.9; extra == "tune"',
        'cute-aot[tune]; extra == "build"',
        "nvidia-cutlass-dsl==4.8.1 ; extra == 'build'",
        'jinja2>=3.1; extra == "report"',
        'pytest>=8; extra == "test"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    there = {"torch": "2.10.0+cu130", "nvidia-cutlass-dsl": "4.7.0"}
    monkeypatch.setattr(installed, "version", there.get)
    assert installed.extras() == [
        installed.Extra("build", ("nvidia-cutlass-dsl==4.8.1 (4.7.0 is installed)",)),
        installed.Extra("report", ("jinja2>=3.1",)),
        installed.Extra("tune", ()),
    ]
    assert "'.[report]'" in found("extra report").remedy


def test_lines_fit_and_json_has_all(run: Run, no_driver: None) -> None:
    listed, found = run("doctor").out.splitlines(), json.loads(run("doctor", "--json").out)
    assert max(map(len, listed)) <= 80
    assert found["ok"]
    assert [row["part"] for row in found["findings"]] == [line[:13].strip() for line in listed[1 : listed.index("")]]
