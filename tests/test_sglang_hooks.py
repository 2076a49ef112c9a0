"""SGLang's published sources have what the plugin replaces and reads, under these names; read, not imported.

`pytest tests/test_sglang_hooks.py --sglang FOLDER`, where FOLDER is the package as a wheel of SGLang holds it, or one
that is installed. Skipped where there is none.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from runtime.sglang import hooks

from .sources import FUNCTIONS, assigned, body_of, calls_of, class_of, folder_of, problem_of, write


@pytest.fixture(scope="session")
def sglang(request: pytest.FixtureRequest) -> Path:
    """The folder of the package `sglang`."""
    return folder_of(request, "sglang", "SGLang")


def method_of(sglang: Path, module: str, owner: str, name: str) -> ast.AST:
    (found,) = (node for node in class_of(sglang, module, owner) if isinstance(node, FUNCTIONS) and node.name == name)
    return found


def function_of(sglang: Path, module: str, name: str) -> ast.AST:
    return next(node for node in body_of(sglang, module) if isinstance(node, FUNCTIONS) and node.name == name)


@pytest.mark.parametrize("hook", [*hooks.HOOKS, hooks.ACTIVATION, *hooks.QUANTISED, hooks.RUNNER], ids=str)
def test_what_is_replaced_or_called_is_there(sglang: Path, hook: hooks.Hook) -> None:
    assert problem_of(sglang, hook) == ""


def test_arguments_that_are_read_are_there(sglang: Path) -> None:
    there = {f"ServerArgs.{name}" for name in assigned(class_of(sglang, "sglang.srt.server_args", "ServerArgs"))}
    assert set(hooks.READ["sglang.srt.server_args"]) - there == set()


@pytest.mark.parametrize("module", [module for module in hooks.READ if ".moe." in module])
def test_fields_that_are_read_are_there(sglang: Path, module: str) -> None:
    there = {
        f"{node.name}.{name}"
        for node in body_of(sglang, module)
        if isinstance(node, ast.ClassDef)
        for name in assigned(node.body)
    }
    assert set(hooks.READ[module]) - there == set()


def test_version_is_one_that_the_table_was_compared_with(sglang: Path) -> None:
    values = {
        node.value.value
        for node in body_of(sglang, "sglang._version")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is not None
    }
    (version,) = {str(value).partition("+")[0] for value in values}
    assert version in hooks.KNOWN_VERSIONS


# --- the mechanism ---


def test_plugins_are_loaded_once_by_group_and_hooks_applied_after_all(sglang: Path) -> None:
    text = "\n".join(ast.unparse(node) for node in body_of(sglang, "sglang.srt.plugins"))
    assert "GENERAL_PLUGINS_GROUP = 'sglang.srt.plugins'" in text
    load = function_of(sglang, "sglang.srt.plugins", "load_plugins")
    assert calls_of(load)[-1] == "apply_hooks"
    assert "if _plugins_loaded:\n        return" in ast.unparse(load)


def test_schedulers_load_plugins_first(sglang: Path) -> None:
    run = function_of(sglang, "sglang.srt.managers.scheduler", "run_scheduler_process")
    assert calls_of(run)[0] == "load_plugins"


def test_schedulers_that_ray_starts_load_none(sglang: Path) -> None:
    """As docs/sglang.md says."""
    text = "\n".join(ast.unparse(node) for node in body_of(sglang, "sglang.srt.ray.scheduler_actor"))
    assert "Scheduler(" in text
    assert "load_plugins" not in text


def test_a_replacement_is_called_with_what_the_method_was_called_with(sglang: Path) -> None:
    module = "sglang.srt.plugins.hook_registry"
    assert {"REPLACE"} <= assigned(class_of(sglang, module, "HookType"))
    text = ast.unparse(function_of(sglang, module, "_wrap_fn"))
    assert "return hook(*args, **kwargs)" in text
    register = ast.unparse(method_of(sglang, module, "HookRegistry", "register"))
    assert "(cls, target: str, hook: Callable, hook_type: HookType=HookType.AFTER, *, source: " in register
    assert assigned(class_of(sglang, module, "HookSource")) == {"plugin_name", "dist_name"}
    apply = ast.unparse(method_of(sglang, module, "HookRegistry", "apply_hooks"))
    assert "if target in cls._patched:\n            continue" in apply


# --- who calls what is replaced ---


def test_a_runner_loads_its_model_before_memory_is_measured_and_graphs_are_captured(sglang: Path) -> None:
    calls = calls_of(method_of(sglang, hooks.MODEL_LOADED.module, "ModelRunner", "initialize"))
    order = [calls.index(name) for name in ("load_model", "init_memory_pool", "init_device_graphs")]
    assert order == sorted(order)
    text = ast.unparse(method_of(sglang, hooks.MODEL_LOADED.module, "ModelRunner", "__init__"))
    for name in ("server_args", "is_draft_worker", "model_config"):
        assert f"self.{name} = {name}" in text


def test_layers_are_called_through_the_class_at_each_call(sglang: Path) -> None:
    """`quant_method.apply(layer, ...)`: an instance that kept the method would go by the replacement."""
    text = "\n".join(ast.unparse(node) for node in body_of(sglang, "sglang.srt.layers.linear"))
    assert text.count("self.quant_method.apply(") >= 3
    heads = ast.unparse(method_of(sglang, hooks.HEAD.module, hooks.HEAD.owner, "_get_logits"))
    assert "self._compute_lm_head(" in heads


@pytest.mark.parametrize("name", hooks.FP8_METHODS)
def test_fp8_layers_come_by_what_is_replaced(sglang: Path, name: str) -> None:
    module, method = hooks.FP8_METHODS[name]
    calls = calls_of(method_of(sglang, module, name, method))
    assert "apply_fp8_linear" in calls
    blocks = "w8a8_block_fp8_linear" in calls
    assert blocks == (name in ("Fp8LinearMethod", "CompressedTensorsW8A8Fp8"))


def test_a_runner_of_experts_calls_the_function_that_it_holds(sglang: Path) -> None:
    run = ast.unparse(method_of(sglang, hooks.RUNNER.module, hooks.RUNNER.owner, "run"))
    assert "return self.fused_func(dispatch_output, quant_info, self.config)" in run
    made = ast.unparse(method_of(sglang, hooks.RUNNER.module, hooks.RUNNER.owner, "__init__"))
    for name in ("runner_backend", "config"):
        assert f"self.{name} = {name}" in made


@pytest.mark.parametrize("name", hooks.EXPERTS_METHODS)
def test_experts_are_computed_by_the_runner_of_their_method(sglang: Path, name: str) -> None:
    """Which is made when the layer is, before weights are loaded."""
    body = "\n".join(ast.unparse(node) for node in class_of(sglang, hooks.EXPERTS_METHODS[name], name))
    assert "self.runner = MoeRunner(" in body
    assert "return self.runner.run(" in body


def test_ids_of_experts_on_other_ranks_are_taken_to_none_before_they_are_computed(sglang: Path) -> None:
    dispatch = ast.unparse(method_of(sglang, hooks.COMBINE_INPUT[0], "StandardDispatcher", "dispatch"))
    assert "topk_ids=self.local_expert_mapping[topk_output.topk_ids]" in dispatch


def test_a_scheme_stands_in_its_layer(sglang: Path) -> None:
    text = "\n".join(
        ast.unparse(node)
        for node in body_of(sglang, "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors")
    )
    assert "layer.scheme.apply_weights(" in text or "scheme.apply_weights(" in text


def test_block_scaled_gemms_are_chosen_from_what_is_replaced(sglang: Path) -> None:
    """Those for Hopper: others are of other GPUs, and layers that use them are left."""
    chosen = set()
    for name in ("_dispatch_auto_backend", "_dispatch_explicit_backend"):
        dispatch = function_of(sglang, hooks.FP8, name)
        returns = [node.value for node in ast.walk(dispatch) if isinstance(node, ast.Return)]
        chosen |= {value.id for value in returns if isinstance(value, ast.Name)}
    others = {"flashinfer_gemm_w8a8_block_fp8_linear_with_fallback", "aiter_w8a8_block_fp8_linear"}
    assert chosen - others == {hook.method for hook in hooks.FP8_BLOCKS}


def test_activations_are_quantised_by_names_of_the_replaced_module(sglang: Path) -> None:
    imported = {
        alias.name for node in body_of(sglang, hooks.FP8) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {hook.method for hook in hooks.QUANTISED} <= imported


@pytest.mark.parametrize("model", ["llama.LlamaMLP", "qwen2.Qwen2MLP"])
def test_mlps_use_what_an_activation_can_be_fused_by(sglang: Path, model: str) -> None:
    module, _, name = model.partition(".")
    forward = method_of(sglang, f"sglang.srt.models.{module}", name, "forward")
    functions: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{ast.unparse(forward)}", functions)
    code = functions["forward"].__code__.co_names
    assert code[-3:] == ("gate_up_proj", "act_fn", "down_proj")
    assert set(code[:-3]) <= hooks.HARMLESS


# --- what is said of sources that differ; no SGLang is needed ---


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def gemm_nt_f8f8bf16(lhs, rhs, out): pass", ""),
        ("def gemm_nt_f8f8bf16(lhs, rhs, out, recipe): pass", "has the parameters lhs, rhs, out, recipe"),
        ("def gemm_fp8(lhs, rhs, out): pass", f"{hooks.DEEP_GEMM} is not there"),
        ("class Owner:\n    def gemm_nt_f8f8bf16(lhs, rhs, out): pass", f"{hooks.DEEP_GEMM} is not there"),
    ],
)
def test_a_function_that_differs_is_named(tmp_path: Path, text: str, problem: str) -> None:
    found = problem_of(write(tmp_path, hooks.DEEP_GEMM.module, text), hooks.DEEP_GEMM)
    assert (found == "") == (problem == "")
    assert problem in found
