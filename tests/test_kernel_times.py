"""What `scripts/kernel_times.py` makes of a trace, and `bench_vllm.py --profile` of an engine that writes one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import bench_vllm
import kernel_times

from .test_bench_vllm import Engine, Runs, in_float32, run_both, runs

__all__ = ["runs"]  # a fixture

OURS = "kernel_cutlass_kernel_aotkernelssm90small_mSmallM_object_at__cutlasscute"
NAMES = {
    OURS: kernel_times.OURS,
    "kernel_cutlass_kernel_aotkernelsrmsnormRmsNorm_object_at__te": "norms",
    "kernel_cutlass_kernel_aotkernelsquantiseQuantise_object_at__": "quantising",
    "kernel_cutlass_kernel_cutlassoperatorsproviderscutedslgemm": kernel_times.OURS,
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<": "attention",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16": "attention",
    "void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<": "quantising",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": "norms",
    "void vllm::rms_norm_static_fp8_quant_kernel<": "norms",
    "void vllm::silu_and_mul_per_block_quant_kernel<c10::BFloat16": "activations",
    "triton_red_fused_fused_add_rms_norm_quantising_gemm_2": "norms",
    "triton_poi_fused_mul_quantising_gemm_silu_slice_1": "activations",
    "triton_red_fused__to_copy_abs_clamp_cutlass_scaled_mm_div_max_mul_reciprocal_3": "quantising",
    "triton_red_fused__to_copy_abs_clamp_div_max_mul_reciprocal_scaled_gemm_3": "quantising",
    "triton_tem_fused_mm_1": "GEMMs",
    "triton_tem_fused__scaled_mm_0": "GEMMs",
    "triton_poi_fused_quantising_gemm_slice_1": kernel_times.OTHERS,
    "triton_poi_fused_mul_silu_slice_1": "activations",
    "fused_moe_kernel": "experts",
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "GEMMs",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<": "GEMMs",
    "void marlin::Marlin<": "GEMMs",
    "void flashinfer::norm::FusedAddRMSNormKernel<": "norms",
    "void flashinfer::activation::act_and_mul_kernel<": "activations",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<": "attention",
    "void vllm::rotary_embedding_kernel<": "positions",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps": kernel_times.OTHERS,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_a_kernel_is_for(name: str) -> None:
    assert kernel_times.purpose(name) == NAMES[name]


def trace(path: Path, *kernels: tuple[str, float, float]) -> None:
    """A file of kernels that begin and last so long, the last first, beside what no GPU did."""
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in kernels[::-1]]
    more = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99}, {"ph": "M", "name": "process_name"}]
    path.write_text(json.dumps({"traceEvents": [*events, *more]}))


def test_a_kernel_counts_for_what_it_adds_to_those_before_it(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", ("nvjet", 0.0, 10.0), (OURS, 4.0, 16.0), ("silu", 12.0, 3.0), ("nvjet", 30.0, 2.0))
    kernels = kernel_times.read(tmp_path / "a.json")
    assert [ran.name for ran in kernels] == ["nvjet", OURS, "silu", "nvjet"]
    found = kernel_times.by_purpose(kernels, steps=2)
    assert found == {"GEMMs": 6.0, kernel_times.OURS: 5.0, "activations": 0.0}, "the pause counts for nothing"
    assert kernel_times.longest(kernels, 2, count=2) == {OURS[:60]: 8.0, "nvjet": 6.0}


def test_the_gpu_waits_for_a_kernel_that_begins_after_all_others_ended(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", ("nvjet", 5.0, 10.0), (OURS, 6.0, 1.0), ("silu", 19.0, 3.0), ("nvjet", 40.0, 2.0))
    found = kernel_times.waits(kernel_times.read(tmp_path / "a.json"), steps=2, count=2)
    assert found == {kernel_times.WAITING: 11.0, "nvjet": 9.0, "silu": 2.0}, "not before the first, nor beside another"


class Profiled(Engine):
    """An engine that writes what its kernels did where it is told to, but `silent` writes nothing."""

    def __init__(self, folder: Path, silent: bool = False) -> None:
        super().__init__(in_float32)
        self.folder, self.silent, self.calls = folder, silent, list[str]()

    def start_profile(self) -> None:
        self.calls.append("start")

    def stop_profile(self) -> None:
        self.calls.append("stop")
        if not self.silent:
            trace(self.folder / f"rank0.{len(self.calls)}.pt.trace.json", (OURS, 0.0, 40.0), ("silu", 50.0, 4.0))

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append(f"{len(prompts)} for {sampling.max_tokens}")
        return super().generate(prompts, sampling, use_tqdm)


@pytest.mark.parametrize("silent", [False, True])
def test_steps_at_each_batch_and_prefills_are_profiled_behind_what_is_measured(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    made: list[Profiled] = []

    def engine(options: Any, folder: Path, is_packed: bool) -> Profiled:
        made.append(Profiled(options.traces, silent))
        return made[0]

    given = ["--batches", "1,3", "--prompts", "8", "--tokens", "4", "--repeats", "1", "--profile", "10"]
    monkeypatch.setattr(bench_vllm, "_engine", engine)
    out = runs.folder / "stock.json"
    monkeypatch.setattr(sys, "argv", ["bench_vllm.py", str(runs.folder), *given, "--out", str(out)])
    assert bench_vllm.main() == 0
    found = json.loads(out.read_text())["profile"]
    us = {kernel_times.OURS: 4.0, "activations": 0.4}
    longest = {OURS[:60]: 4.0, "silu": 0.4}
    waits = {kernel_times.WAITING: 1.0, "silu": 1.0, OURS[:60]: 0.0}
    step = {"us": us, "longest": longest, "waits": waits}
    assert found == dict.fromkeys(("1", "3", "prefill of 8"), None if silent else step)
    (first,) = made
    begin = first.calls.index("start")
    assert first.calls[begin : begin + 6] == ["start", "1 for 26", "stop", "start", "3 for 26", "stop"]
    assert first.calls[begin + 6 : begin + 26] == ["start", *["1 for 1"] * 18, "stop"], "as many after the delay"
    assert not first.folder.exists(), "traces are hundreds of megabytes"


def test_both_engines_are_profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, commands, _ = run_both(monkeypatch, tmp_path, (0, 0, 0, 0), "--profile", "16")
    assert all("--profile=16" in command for command in commands.values())
