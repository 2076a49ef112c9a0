"""vLLM's published sources have what the plugin wraps and reads, under these names; read, not imported.

`pytest tests/test_vllm_hooks.py --vllm FOLDER`, where FOLDER is the package as a wheel of vLLM holds it, or one that is
installed. Skipped where there is none.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from runtime.numbers.epilogue import CLAMPED_ALPHA, CLAMPED_LIMIT
from runtime.plugin.metrics import FOLDER
from runtime.vllm import hooks

from .sources import FUNCTIONS, assigned, body_of, calls_of, class_of, folder_of, problem_of, write


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest) -> Path:
    """The folder of the package `vllm`."""
    return folder_of(request, "vllm", "vLLM")


@pytest.mark.parametrize(
    "hook",
    [
        *(*hooks.HOOKS, *hooks.FILLED, *hooks.FILLED_INT4, *hooks.FILLED_EXPERTS, *hooks.MADE),
        *(hooks.PERMUTE, hooks.ACTIVATION, hooks.NORM, hooks.PASS, hooks.PASS_KEY, hooks.MODEL),
    ],
    ids=str,
)
def test_methods_that_are_wrapped_or_filled_are_there(vllm: Path, hook: hooks.Hook) -> None:
    assert problem_of(vllm, hook) == ""


@pytest.mark.parametrize("module", hooks.READ)
def test_names_that_are_read_are_there(vllm: Path, module: str) -> None:
    there = assigned(body_of(vllm, module))
    for node in body_of(vllm, module):
        if isinstance(node, ast.ClassDef):
            there |= {f"{node.name}.{name}" for name in assigned(node.body)}
    assert set(hooks.READ[module]) - there == set()


def test_a_norm_has_what_the_plugin_reads_and_calls_what_it_replaces(vllm: Path) -> None:
    (norm,) = (f for f in class_of(vllm, hooks.NORM.module, "RMSNorm") if getattr(f, "name", "") == "__init__")
    made = {node.attr for node in ast.walk(norm) if isinstance(node, ast.Attribute)}
    assert {"has_weight", "variance_size_override", "variance_epsilon", "weight"} <= made
    base = class_of(vllm, "vllm.model_executor.custom_op", "CustomOp")
    (forward,) = (f for f in base if isinstance(f, FUNCTIONS) and f.name == "forward")
    assert calls_of(forward) == ["_forward_method"]


def test_a_model_is_known_to_generate_or_not(vllm: Path) -> None:
    config = class_of(vllm, "vllm.config.model", "ModelConfig")
    (made,) = (f for f in config if isinstance(f, FUNCTIONS) and f.name == "__post_init__")
    assert "runner_type" in {
        node.attr for node in ast.walk(made) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    types = [node for node in body_of(vllm, "vllm.config.model") if "RunnerType" in ast.unparse(node)]
    assert any("'pooling'" in ast.unparse(node) for node in types)


def test_version_is_one_that_the_table_was_compared_with(vllm: Path) -> None:
    (version,) = (
        node.value.value
        for node in body_of(vllm, "vllm._version")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and "version" in assigned([node])
    )
    assert str(version).partition("+")[0] in hooks.KNOWN_VERSIONS


def test_plugins_are_loaded_by_group_in_a_worker_before_it_is_made(vllm: Path) -> None:
    groups = {node.value.value for node in body_of(vllm, "vllm.plugins") if _is_text(node)}  # type: ignore[attr-defined]
    assert "vllm.general_plugins" in groups
    wrapper = class_of(vllm, hooks.WORKER.module, "WorkerWrapperBase")
    calls = [
        called
        for function in wrapper
        if isinstance(function, FUNCTIONS)
        for called in calls_of(function)
        if called in ("load_general_plugins", "worker_class")
    ]
    assert calls == ["load_general_plugins", "worker_class"]


@pytest.mark.parametrize(
    ("method", "inner"),
    [
        ("__init__", "__init__"),  # of WorkerBase, which is wrapped
        ("load_model", "load_model"),  # of the model runner, which lets layers process their weights
    ],
)
def test_the_gpu_worker_comes_by_what_is_wrapped(vllm: Path, method: str, inner: str) -> None:
    body = class_of(vllm, hooks.MODEL_LOADED.module, hooks.MODEL_LOADED.owner)
    (function,) = (node for node in body if isinstance(node, FUNCTIONS) and node.name == method)
    assert inner in calls_of(function)


def test_cache_keys_are_made_of_what_the_plugin_wraps(vllm: Path) -> None:
    for module in ("vllm.compilation.backends", "vllm.compilation.caching"):
        text = "\n".join(ast.unparse(node) for node in body_of(vllm, module))
        assert "vllm_config.compute_hash()" in text, module


def test_layers_are_called_through_the_class_at_each_call(vllm: Path) -> None:
    """`quant_method.apply(layer, ...)`: an instance that kept the method would go by the wrapper."""
    for module in (hooks.LINEAR.module, "vllm.model_executor.layers.logits_processor"):
        text = "\n".join(ast.unparse(node) for node in body_of(vllm, module))
        assert "quant_method.apply(" in text, module


@pytest.mark.parametrize("hook", hooks.STEPS, ids=str)
def test_steps_of_requests_come_by_what_is_counted_once_and_other_runs_do_not(vllm: Path, hook: hooks.Hook) -> None:
    """The runner for version 2 makes dummy runs by `execute_model` too, with a branch of their own."""
    calls = {
        function.name: _calls_of_self(function, hook.method)
        for function in class_of(vllm, hook.module, hook.owner)
        if isinstance(function, FUNCTIONS)
    }
    assert {name: len(found) for name, found in calls.items() if found} == {"execute_model": 1}
    text = ast.unparse(calls["execute_model"][0])
    assert "positions=positions" in text if hook is hooks.STEP_V1 else "(scheduler_output, batch_desc)" in text


def test_dummy_runs_prepare_no_inputs(vllm: Path) -> None:
    (function,) = (
        node
        for node in class_of(vllm, hooks.STEP_V2.module, hooks.STEP_V2.owner)
        if isinstance(node, FUNCTIONS) and node.name == "execute_model"
    )
    (branch,) = (
        node
        for node in ast.walk(function)
        if isinstance(node, ast.If) and any(_calls_of_self(step, "prepare_inputs") for step in node.body)
    )
    assert ast.unparse(branch.test) == "not dummy_run"


def test_logits_come_by_what_is_counted(vllm: Path) -> None:
    body = class_of(vllm, hooks.LOGITS.module, hooks.LOGITS.owner)
    (forward,) = (node for node in body if isinstance(node, FUNCTIONS) and node.name == "forward")
    (call,) = _calls_of_self(forward, hooks.LOGITS.method)
    assert ast.unparse(call) == "self._get_logits(hidden_states, lm_head, embedding_bias)"


# --- memory, and metrics ---

_CORE, _EXECUTORS, _INSTRUMENTATOR = "vllm.v1.engine.core", "vllm.v1.executor", "vllm.entrypoints.serve.instrumentator"


def test_memory_is_measured_when_models_were_loaded_and_graphs_are_captured_after(vllm: Path) -> None:
    """Workspaces that graphs share are allocated when a model is loaded: vLLM's count of memory has them."""
    core = {node.name: calls_of(node) for node in class_of(vllm, _CORE, "EngineCore") if isinstance(node, FUNCTIONS)}
    made = core["__init__"]
    assert made.index("executor_class") < made.index("_initialize_kv_caches")
    measuring = [name for name, calls in core.items() if "determine_available_memory" in calls]
    assert measuring == ["_initialize_kv_caches"]
    calls = core["_initialize_kv_caches"]
    assert calls.index("determine_available_memory") < calls.index("initialize_from_config")
    executor = f"{_EXECUTORS}.abstract", "Executor"
    assert "_init_executor" in calls_of(_function(vllm, *executor, "__init__"))
    for method, asked in (
        ("determine_available_memory", "determine_available_memory"),
        ("initialize_from_config", "compile_or_warm_up_model"),  # which captures graphs
    ):
        assert f"self.collective_rpc('{asked}')" in ast.unparse(_function(vllm, *executor, method))


def test_executors_are_made_when_their_workers_have_loaded_the_model(vllm: Path) -> None:
    alone = calls_of(_function(vllm, f"{_EXECUTORS}.uniproc_executor", "UniProcExecutor", "_init_executor"))
    assert "load_model" in alone
    module = f"{_EXECUTORS}.multiproc_executor"
    assert "wait_for_ready" in calls_of(_function(vllm, module, "MultiprocExecutor", "_init_executor"))
    assert "load_model" in calls_of(_function(vllm, module, "WorkerProc", "__init__"))
    text = ast.unparse(_function(vllm, module, "WorkerProc", "worker_main"))
    made, ready = (
        text.index(part) for part in ("worker = WorkerProc(", "ready_writer.send({'status': WorkerProc.READY_STR")
    )
    assert made < ready


def test_metrics_of_all_processes_are_served_where_a_folder_is_set(vllm: Path) -> None:
    registry = _function(vllm, "vllm.v1.metrics.prometheus", "", "get_prometheus_registry")
    (branch,) = (node for node in ast.walk(registry) if isinstance(node, ast.If))
    assert f"os.getenv('{FOLDER}') is not None" == ast.unparse(branch.test)
    assert "multiprocess.MultiProcessCollector(registry)\n" in "\n".join(map(ast.unparse, branch.body))
    assert ast.unparse(branch.body[-1]) == "return registry"
    served = ast.unparse(_function(vllm, f"{_INSTRUMENTATOR}.metrics", "", "attach_router"))
    assert "registry = get_prometheus_registry()\n" in served
    assert "Mount('/metrics', make_asgi_app(registry=registry))" in served


# --- experts ---

_MOE = "vllm.model_executor.layers.fused_moe"


def _function(vllm: Path, module: str, owner: str, name: str) -> ast.AST:
    body = class_of(vllm, module, owner) if owner else body_of(vllm, module)
    (found,) = (node for node in body if isinstance(node, FUNCTIONS) and node.name == name)
    return found


def test_layers_of_experts_have_what_is_read(vllm: Path) -> None:
    """Attributes that are set in `__init__`, or that are properties, of layers and of methods."""
    of_layer = "\n".join(ast.unparse(node) for node in class_of(vllm, f"{_MOE}.routed_experts", "RoutedExperts"))
    names = ("top_k", "activation", "apply_router_weight_on_input", "swiglu_limit", "swiglu_alpha", "swiglu_beta")
    assert [name for name in (*names, "layer_name", "quant_method") if f"self.{name} = " not in of_layer] == []
    assert "def expert_map(self)" in of_layer
    module, owner = hooks.EXPERTS_LOADED.module, hooks.EXPERTS_LOADED.owner
    of_method = "\n".join(ast.unparse(node) for node in class_of(vllm, module, owner))
    assert "register_parameter('w13_weight'" in of_method
    assert "register_parameter('w2_weight'" in of_method
    base = ast.unparse(_function(vllm, f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase", "__init__"))
    assert "self.moe: FusedMoEConfig = moe" in base
    assert "self.moe_kernel: " in base


def test_the_class_of_experts_is_made_when_weights_were_loaded(vllm: Path) -> None:
    module, owner = hooks.EXPERTS_LOADED.module, hooks.EXPERTS_LOADED.owner
    assert "self.experts_cls = select_unquantized_moe_backend(" in ast.unparse(
        _function(vllm, module, owner, "__init__")
    )
    assert "_setup_kernel" in calls_of(_function(vllm, module, owner, hooks.EXPERTS_LOADED.method))
    made = ast.unparse(_function(vllm, module, owner, "_setup_kernel"))
    assert "experts_cls=self.experts_cls" in made
    make = ast.unparse(_function(vllm, f"{_MOE}.oracle.unquantized", "", "make_unquantized_moe_kernel"))
    assert "experts = experts_cls(moe_config=moe_config, quant_config=quant_config)" in make


def test_experts_are_applied_by_keyword_and_reduced_after(vllm: Path) -> None:
    """What `apply` leaves for the class that reduces is fetched once, after it, and before other experts run."""
    kernel = f"{_MOE}.modular_kernel", "FusedMoEKernelModularImpl"
    (call,) = (
        node
        for node in ast.walk(_function(vllm, *kernel, "_fused_experts"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.fused_experts.apply"
    )
    (applied,) = (hook for hook in hooks.FILLED_EXPERTS if hook.method == "apply" and hook is not hooks.REDUCE)
    assert {word.arg for word in call.keywords} == set(applied.parameters) - {"self"}
    calls = [c for c in calls_of(_function(vllm, *kernel, "apply")) if c in ("_prepare", "_fused_experts", "_finalize")]
    assert calls == ["_prepare", "_fused_experts", "_finalize"]
    finalized = ast.unparse(_function(vllm, *kernel, "_finalize"))
    assert finalized.count("self.fused_experts.finalize_weight_and_reduce_impl()") == 2  # in two branches
    alone = _function(vllm, f"{_MOE}.prepare_finalize.no_dp_ep", "MoEPrepareAndFinalizeNoDPEPModular", "finalize")
    assert "weight_and_reduce_impl.apply(output=output, fused_expert_output=" in ast.unparse(alone)


@pytest.mark.parametrize("hook", hooks.MXFP4_EXPERTS_LOADED, ids=str)
def test_weights_in_mxfp4_are_laid_out_when_they_were_loaded_and_the_class_is_chosen_before(
    vllm: Path, hook: hooks.Hook
) -> None:
    assert "self.experts_cls = " in ast.unparse(_function(vllm, hook.module, hook.owner, "__init__"))
    assert "_setup_kernel" in calls_of(_function(vllm, hook.module, hook.owner, hook.method))
    laid_out = ast.unparse(_function(vllm, hook.module, hook.owner, "_setup_kernel"))
    assert "self.moe_quant_config = " in laid_out
    assert "self.moe_kernel = make_mxfp4_moe_kernel(" in laid_out
    made = ast.unparse(_function(vllm, hook.module, hook.owner, "create_weights"))
    names = [f"{name}_{of}" for name in ("w13", "w2") for of in ("weight", "weight_scale", "bias")]
    assert [name for name in names if f"layer.register_parameter('{name}', {name})" not in made] == []
    called = ast.unparse(_function(vllm, hook.module, hook.owner, "apply"))
    assert "self.moe_kernel.apply(hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight, " in called


def test_a_kernel_in_place_decides_whether_experts_are_asked_for_with_their_routes(vllm: Path) -> None:
    """At each call, so that a kernel of another kind than vLLM chose may take its place when weights are loaded."""
    of = ast.unparse(_function(vllm, f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase", "is_monolithic"))
    assert "return self.moe_kernel.is_monolithic" in of
    call = ast.unparse(_function(vllm, f"{_MOE}.runner.moe_runner", "MoERunner", "_apply_quant_method"))
    assert "if self.routed_experts.quant_method.is_monolithic:" in call
    assert "self.router.select_experts(" in call
    parallel = class_of(vllm, f"{_MOE}.config", "FusedMoEParallelConfig")
    assert "use_all2all_kernels" in {node.name for node in parallel if isinstance(node, FUNCTIONS)}
    routed = class_of(vllm, f"{_MOE}.routed_experts", "RoutedExperts")
    assert "_expert_routing_tables" in {node.name for node in routed if isinstance(node, FUNCTIONS)}


def test_gates_of_gpt_oss_have_the_factor_and_limits_of_the_epilogue(vllm: Path) -> None:
    hook = hooks.MXFP4_EXPERTS_LOADED[0]
    described = ast.unparse(_function(vllm, hook.module, hook.owner, "get_fused_moe_quant_config"))
    assert f"gemm1_alpha={CLAMPED_ALPHA}, gemm1_beta=1.0, swiglu_limit={CLAMPED_LIMIT}" in described


def test_output_shares_the_first_workspace_and_not_the_second(vllm: Path) -> None:
    """Rows and positions are in the second one until the output is written."""
    text = ast.unparse(_function(vllm, f"{_MOE}.modular_kernel", "FusedMoEKernelModularImpl", "_allocate_buffers"))
    assert "fused_out = _resize_cache(common_workspace, fused_out_shape)" in text
    assert "(workspace2_shape, workspace_dtype)" in text


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _calls_of_self(function: ast.AST, method: str) -> list[ast.Call]:
    """The calls of `self.METHOD` in a function."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == f"self.{method}"]


# --- what is said of sources that differ; no vLLM is needed ---


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("class UnquantizedLinearMethod:\n    def apply(self, layer, x, bias=None): pass", ""),
        ("class UnquantizedLinearMethod:\n    def apply(self, layer, x, *, bias=None): pass", ""),
        (
            "class UnquantizedLinearMethod:\n    def apply(self, layer, x, bias=None, out=None): pass",
            "self, layer, x, bias, out",
        ),
        ("class UnquantizedLinearMethod:\n    def apply(self, layer, *x): pass", "has the parameters self, layer, x"),
        ("class UnquantizedLinearMethod:\n    def run(self, layer, x, bias=None): pass", "apply is not there"),
        ("class OtherMethod:\n    def apply(self, layer, x, bias=None): pass", "apply is not there"),
    ],
)
def test_a_hook_that_differs_is_named(tmp_path: Path, text: str, problem: str) -> None:
    found = problem_of(write(tmp_path, hooks.LINEAR.module, text), hooks.LINEAR)
    assert (found == "") == (problem == "")
    assert problem in found
    assert problem_of(tmp_path / "vllm", hooks.HEAD) == f"{hooks.HEAD} is not there"
