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


@pytest.mark.parametrize(
    "hook", [*hooks.HOOKS, hooks.ACTIVATION, *hooks.QUANTISED, hooks.RUNNER, hooks.LANGUAGE_MODEL], ids=str
)
def test_what_is_replaced_or_called_is_there(sglang: Path, hook: hooks.Hook) -> None:
    assert problem_of(sglang, hook) == ""


@pytest.mark.parametrize("module", [module for module in hooks.READ if "." in "".join(hooks.READ[module])])
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


def test_hooks_are_called_with_what_the_method_was_called_with(sglang: Path) -> None:
    module = "sglang.srt.plugins.hook_registry"
    assert {"REPLACE", "AROUND"} <= assigned(class_of(sglang, module, "HookType"))
    text = ast.unparse(function_of(sglang, module, "_wrap_fn"))
    assert (
        "@functools.wraps(original_fn)\n        def wrapper(*args, **kwargs):\n            return hook(*args, **kwargs)"
        in text
    )
    assert "        def wrapper(*args, **kwargs):\n            return hook(original_fn, *args, **kwargs)" in text
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
    ranks = ("tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank")
    for name in ("server_args", "is_draft_worker", "model_config", *ranks):
        assert f"self.{name} = {name}\n" in text
    assert "self.is_generation = model_config.is_generation\n" in text
    config = method_of(sglang, "sglang.srt.configs.model_config", "ModelConfig", "__init__")
    assert "self.model_path = model_path\n" in ast.unparse(config)


def test_layers_are_called_through_the_class_at_each_call(sglang: Path) -> None:
    """`quant_method.apply(layer, ...)`: an instance that kept the method would go by the replacement."""
    text = "\n".join(ast.unparse(node) for node in body_of(sglang, "sglang.srt.layers.linear"))
    assert text.count("self.quant_method.apply(") >= 3
    heads = ast.unparse(method_of(sglang, hooks.HEAD.module, hooks.HEAD.owner, "_get_logits"))
    assert "self._compute_lm_head(" in heads
    made = ast.unparse(method_of(sglang, hooks.HEAD.module, hooks.HEAD.owner, "__init__"))
    assert "self.use_fp32_lm_head = get_global_server_args().enable_fp32_lm_head\n" in made


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
    if name != hooks.FP8_EXPERTS:
        assert "elif self.use_flashinfer_cutlass:" in body


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("gptq.schemes.gptq_linear", "qweight"),
        ("compressed_tensors.schemes.compressed_tensors_wNa16", "weight_packed"),
        ("marlin_utils", "B"),
        ("moe_wna16", "w13_qweight"),
        ("compressed_tensors.schemes.compressed_tensors_wNa16_moe", "w13_weight_packed"),
    ],
)
def test_packed_weights_have_these_names(sglang: Path, module: str, name: str) -> None:
    assert name in hooks.PACKED + hooks.PACKED_EXPERTS
    text = "\n".join(ast.unparse(node) for node in body_of(sglang, f"sglang.srt.layers.quantization.{module}"))
    assert f"layer.register_parameter('{name}', " in text


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


# --- what is recorded: each step once, with the rows that layers see ---

RUNNER = hooks.STEP.module, hooks.STEP.owner


def callers(body: list[ast.stmt], call: str) -> dict[str, int]:
    """How often each function of a class, or of a module, calls this."""
    functions = [node for node in body if isinstance(node, FUNCTIONS)]
    counts = {node.name: ast.unparse(node).count(call) for node in functions}
    return {name: count for name, count in counts.items() if count}


def test_steps_come_by_what_is_counted_and_runs_that_warm_up_do_not(sglang: Path) -> None:
    """Those, and captures, call the model's forward themselves. A rank that failed has a step run again."""
    body = class_of(sglang, *RUNNER)
    assert callers(body, "self._forward_raw(") == {"forward": 1, "_maybe_rebalance_after_rank_fault": 1}
    assert "self._maybe_rebalance_after_rank_fault(" in ast.unparse(method_of(sglang, *RUNNER, "forward"))
    dummy = ast.unparse(method_of(sglang, *RUNNER, "_dummy_run"))
    assert "self.model.forward(" in dummy
    assert "self.forward(" not in dummy
    for hook in (hooks.REPLAY, hooks.PIECES):
        for name in ("capture", "capture_one_batch_size"):
            text = ast.unparse(method_of(sglang, hook.module, hook.owner, name))
            assert "_forward_raw" not in text
            assert "model_runner.forward(" not in text


def test_a_step_says_whether_a_graph_was_replayed_by_what_is_replaced(sglang: Path) -> None:
    step = ast.unparse(method_of(sglang, *RUNNER, hooks.STEP.method))
    assert "ret = self.graph_runner.replay(forward_batch, pp_proxy_tensors=pp_proxy_tensors)\n" in step
    assert step.count("return ModelRunnerOutput(logits_output=ret, can_run_graph=can_run_graph)") == 2
    assert "ret, can_run_graph = self.forward_extend(" in step
    extend = ast.unparse(method_of(sglang, *RUNNER, "forward_extend"))
    assert "ret = self.piecewise_cuda_graph_runner.replay(forward_batch, **kwargs)\n" in extend
    assert extend.count("return (ret, can_run_graph)") == 2
    made = ast.unparse(method_of(sglang, *RUNNER, "init_device_graphs"))
    assert "lambda: CudaGraphRunner" in made


def test_a_graph_of_a_step_has_the_rows_that_are_counted(sglang: Path) -> None:
    module, owner = hooks.REPLAY.module, hooks.REPLAY.owner
    replay = ast.unparse(method_of(sglang, module, owner, "replay"))
    assert "graph_key = self.bs\n" in replay
    assert "self.graphs[graph_key].replay()" in replay
    prepare = ast.unparse(method_of(sglang, module, owner, "replay_prepare"))
    assert "self.bs = bs\n" in prepare
    assert "padded_num_tokens=bs * self.num_tokens_per_bs" in prepare
    capture = ast.unparse(method_of(sglang, module, owner, "capture_one_batch_size"))
    assert "num_tokens = bs * self.num_tokens_per_bs\n" in capture


def test_in_a_graph_of_a_step_the_head_sees_the_rows_that_layers_see(sglang: Path) -> None:
    pruned = method_of(sglang, hooks.LOGITS.module, hooks.LOGITS.owner, "_get_pruned_states")
    branch = next(node for node in ast.walk(pruned) if isinstance(node, ast.If))
    for mode in ("is_decode_or_idle", "is_target_verify"):
        assert f"logits_metadata.forward_mode.{mode}()" in ast.unparse(branch.test)
    assert ast.unparse(branch.body[0]) == "pruned_states = hidden_states"
    diffusion = ast.unparse(method_of(sglang, hooks.LOGITS.module, hooks.LOGITS.owner, "_get_dllm_logits"))
    assert "self._get_logits(hidden_states, lm_head, logits_metadata)" in diffusion
    modes = class_of(sglang, "sglang.srt.model_executor.forward_batch_info", "ForwardMode")
    (graphs,) = (node for node in modes if isinstance(node, FUNCTIONS) and node.name == "is_cuda_graph")
    compared = {node.attr for node in ast.walk(graphs) if isinstance(node, ast.Attribute)}
    assert compared == {"DECODE", "TARGET_VERIFY", "IDLE", "DLLM_EXTEND"}


@pytest.mark.parametrize("kind", ["piecewise", "breakable"])
def test_pieces_are_as_large_as_what_is_replaced_makes_a_batch(sglang: Path, kind: str) -> None:
    module, owner = f"sglang.srt.model_executor.{kind}_cuda_graph_runner", f"{kind.capitalize()}CudaGraphRunner"
    replay = ast.unparse(method_of(sglang, module, owner, "replay"))
    assert "static_forward_batch = self.replay_prepare(forward_batch, **kwargs)\n" in replay
    assert "self.model_runner.model.forward(static_forward_batch.input_ids, " in replay
    if kind == "breakable":
        prepare = ast.unparse(method_of(sglang, module, owner, "replay_prepare"))
        assert f"{hooks.PIECES.owner}.{hooks.PIECES.method}(self, forward_batch, **kwargs)" in prepare


def test_logits_come_by_what_is_counted_with_the_rows_of_the_product(sglang: Path) -> None:
    """Unless attention is data-parallel, whose servers are not recorded."""
    body = class_of(sglang, hooks.LOGITS.module, hooks.LOGITS.owner)
    assert callers(body, "self._compute_lm_head(") == {"_get_logits": 1}
    gather = ast.unparse(method_of(sglang, hooks.LOGITS.module, hooks.LOGITS.owner, "_gather_dp_attn_hidden_states"))
    assert "if self.do_tensor_parallel_all_gather_dp_attn:" in gather
    assert gather.endswith("return (hidden_states, hidden_states)")


def test_other_rows_are_seen_only_by_what_is_not_recorded(sglang: Path) -> None:
    """Batches are gathered or scattered between ranks by these arguments alone."""
    read = {name.partition(".")[2] for name in hooks.READ["sglang.srt.server_args"]}
    found = set()
    for name in ("require_mlp_tp_gather", "require_attn_tp_gather"):
        function = function_of(sglang, "sglang.srt.utils.common", name)
        found |= {
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "server_args"
        }
    of_attention = {"dp_size", "tp_size", "enable_dp_lm_head", "disable_attn_tp_gather"}
    assert found - of_attention == {"enable_dp_attention", "moe_dense_tp_size"} & read
    assert "get_moe_a2a_backend().is_none()" in ast.unparse(function)


def test_schedulers_are_killed_at_the_end(sglang: Path) -> None:
    """As docs/sglang.md says: a record is written now and then, and not when they end."""
    assert "child.kill()" in ast.unparse(function_of(sglang, "sglang.srt.utils.common", "kill_process_tree"))
    shutdown = ast.unparse(method_of(sglang, "sglang.srt.entrypoints.engine", "Engine", "shutdown"))
    assert "kill_process_tree(os.getpid(), include_parent=False" in shutdown


# --- metrics ---


def test_schedulers_find_the_folder_of_metrics_in_their_environment(sglang: Path) -> None:
    module = "sglang.srt.entrypoints.engine"
    set_up = ast.unparse(function_of(sglang, module, "_set_envs_and_config"))
    assert "if server_args.enable_metrics:\n        set_prometheus_multiproc_dir()" in set_up
    calls = calls_of(method_of(sglang, module, "Engine", "_launch_subprocesses"))
    assert calls.index("_set_envs_and_config") < calls.index("_launch_scheduler_processes")
    folder = ast.unparse(function_of(sglang, "sglang.srt.utils.common", "set_prometheus_multiproc_dir"))
    assert "os.environ['PROMETHEUS_MULTIPROC_DIR'] = prometheus_multiproc_dir.name" in folder


def test_the_server_shows_what_all_processes_wrote_there(sglang: Path) -> None:
    shown = ast.unparse(function_of(sglang, "sglang.srt.utils.common", "add_prometheus_middleware"))
    assert "multiprocess.MultiProcessCollector(registry)" in shown
    assert "make_asgi_app(registry=registry)" in shown


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
