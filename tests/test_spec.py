"""Specs of users' own functions: what they may say, and one clear error for each way they can be wrong."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.providers import spec_file
from aot.providers.origin import origin
from aot.spec import Clusters, Constant, Function, Options, Scalar, SpecError, Stream, Symbol, Tensor, Workspace
from runtime.container import canonical
from runtime.program import arguments

from .command_line import ROOT

X, Y = Tensor("x", "f32", ("n",)), Tensor("y", "f32", ("n",), role="out")
HEAD = "from aot.spec import *\n"
WHOLE = HEAD + "functions = [Function('f', [Tensor('x', 'f32', ('n',)), Stream()], make=lambda: print)]\n"


def function(*arguments: Any, **more: Any) -> Function:
    return Function(**{"name": "f", "make": lambda: None, "arguments": [*arguments, Stream()], **more})


# --- what an argument description says ---


def test_arguments_become_those_of_a_record_without_constants() -> None:
    record = function(
        Tensor("x", "bf16", ("m", Symbol("k", divisibility=8)), alignment=16),
        Tensor("y", "f32", ("m", 64), strides=("ldy", 1)),
        Constant("bias", None),
        Scalar("eps", "f32"),
        Workspace("partials", 4096, each="clusters", zeroed=True),
        Clusters("clusters", 2),
    ).record()
    tree, symbols = arguments.to_json(record[0]), arguments.symbols_to_json(record[1])
    assert [node["kind"] for node in tree] == ["tensor", "tensor", "scalar", "workspace", "device", "stream"]
    assert tree[0] == {
        "kind": "tensor",
        "name": "x",
        "dtype": "bf16",
        "shape": ["m", "k"],
        "strides": ["x_stride0", 1],
        "alignment": 16,
    }
    assert (tree[1]["strides"], tree[1]["alignment"]) == (["ldy", 1], 4)
    assert symbols == {
        "m": {"width": 32, "divisibility": 1},
        "k": {"width": 32, "divisibility": 8},
        "x_stride0": {"width": 64, "divisibility": 8},
        "ldy": {"width": 64, "divisibility": 1},
    }


def test_a_word_and_a_symbol_of_one_name_are_one_symbol() -> None:
    _, symbols = function(Tensor("x", "f32", ("n",)), Tensor("y", "f32", (Symbol("n", divisibility=4),))).record()
    assert symbols == {"n": arguments.Symbol(32, 4)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tensor("x", "bfloat16", ("n",)), "tensor 'x': unknown element type 'bfloat16'; did you mean 'bf16'"),
        (lambda: Tensor("x", "F32", ("n",)), "unknown element type 'F32'; did you mean 'f32'"),
        (lambda: Tensor("x", "f32", "n"), "tensor 'x': shape must be a list or a tuple, found 'n'"),
        (lambda: Tensor("x", "f32", (-1,)), "shape: -1 is no integer from 0 on, no name and no Symbol"),
        (lambda: Tensor("x", "f32", ("m", "n"), strides=(1,)), "has 2 extents and 1 strides"),
        (
            lambda: Tensor("x", "f32", ("n",), alignment=24),
            "alignment must be a power of two up to 4096 bytes, found 24",
        ),
        (lambda: Tensor("x", "f32", ("n",), role="output"), "role must be one of in, out, inout, found 'output'"),
        (lambda: Tensor("a b", "f32", ("n",)), "a tensor cannot be called 'a b'"),
        (lambda: Symbol("n", divisibility=0), "symbol 'n': divisibility must be 1 or more, found 0"),
        (lambda: Symbol("n", width=16), "symbol 'n': width must be 32 or 64, found 16"),
        (lambda: Scalar("eps", "f64"), "scalar 'eps': unknown type 'f64'"),
        (
            lambda: Scalar("eps", "f32", value="a"),  # type: ignore[arg-type]
            "scalar 'eps': value, which checks pass, must be a number, found 'a'; give value=1.0, or leave it out",
        ),
        (
            lambda: Scalar("eps", "f32", value=True),
            "scalar 'eps': value, which checks pass, must be a number, found True",
        ),
        (
            lambda: Scalar("n", "i32", value=0.5),
            "scalar 'n': value, .* must be an integer of 32 bits, found 0.5; give value=1,",
        ),
        (lambda: Scalar("n", "i32", value=1 << 31), "an integer of 32 bits, found 2147483648"),
        (lambda: Workspace("w", 0), "workspace 'w': bytes must be 1 or more"),
        (lambda: Clusters("c", 0), "cluster_size must be from 1 to 64"),
        (lambda: Options(opt_level=9), "opt_level must be from 0 to 3, found 9"),
        (lambda: Function("f", [X]), "function 'f': has neither make nor source"),
        (lambda: Function("f", [X, Stream()], source="quack.rmsnorm"), "source must be like 'package.module:name'"),
        (lambda: Function("f", [X], make=print), "function 'f': has 0 Stream arguments; it needs one"),
        (lambda: function(), "has no Tensor argument"),
        (lambda: function(X, X), "two arguments are called 'x'"),
        (lambda: function(X, 5), "5 is no argument; they are Tensor, Scalar, Constant"),
        (lambda: function(Workspace("w", 4), X), "workspaces must follow all tensors"),
        (lambda: function(X, Scalar("n", "i32")), "'n' names both a symbol and a number"),
        (lambda: function(X, Tensor("y", "f32", (Symbol("n", 4),)), Tensor("z", "f32", (Symbol("n", 8),))), "two ways"),
        (lambda: function(X, reference=print), "has a reference and no output; give tensors that it writes role='out'"),
        (lambda: function(Y, Tensor("i", "i32", ("n",)), reference=print), "tensor 'i' of integers needs values="),
        (
            lambda: function(Y, Tensor("i", "i32", ("n",), values=(0, "k")), reference=print),
            "values name 'k', which is no",
        ),
        (lambda: function(X, targets=["sm_90"]), "unknown target 'sm_90'; did you mean 'sm_90a'"),
        (lambda: function(X, cases=[{"m": 1}]), r"the case {'m': 1} and the free extents \['n'\] differ"),
        (
            lambda: function(Tensor("x", "f32", (Symbol("n", 8),)), cases=[{"n": 4}]),
            "case n = 4: must be a multiple of 8",
        ),
        (lambda: function(X, make=5), "make must be a function, found 5"),
        (lambda: function(X, targets="sm_90a"), 'targets must be a list of names such as "sm_90a", found .sm_90a.'),
        (lambda: function(X, targets=[90]), "targets must be a list of names"),
        (lambda: function(X, depends="torch"), "depends must be a list of names of modules, found 'torch'"),
        (lambda: function(X, cases=5), "cases must be a list of dictionaries"),
        (lambda: function(X, cases=[4]), "cases must be a list of dictionaries"),
        (lambda: function(X, tolerance="x"), "tolerance must be a number above 0, found 'x'"),
        (lambda: function(X, tolerance=0), "tolerance must be a number above 0, found 0"),
        (lambda: function(X, variants={"a": 1}), "variant 'a' must be a dictionary"),
        (
            lambda: Function("f", [X, Stream()], source="a:b", variants={"a": {"t": 1}}),
            "there is no make to give them to",
        ),
    ],
)
def test_what_makes_no_sense_is_an_error(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


# --- reading a spec ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef f(:\n", "SPEC:2: SyntaxError: invalid syntax"),
        ("x = 1\n\nx.y\n", "SPEC:3: AttributeError: 'int' object has no attribute 'y'"),
        ("def f():\n    raise ValueError('no\\nmore')\nf()\n", "SPEC:2: ValueError: no"),
        ("import sys\nsys.exit('enough')\n", "SPEC:2: SystemExit: enough"),
        ("import no_such\n", "SPEC:1: ModuleNotFoundError: No module named 'no_such'; import the DSL inside make and"),
        (HEAD + "\nTensor('x', 'f8', ('n',))\n", "SPEC:3: tensor 'x': unknown element type 'f8'"),
        (
            HEAD + "\nTensor('x', 'f32', ('n',), align=16)\n",
            "SPEC:3: Tensor has no field 'align'; did you mean 'alignment'? known: name, dtype, shape",
        ),
        (
            HEAD + "functions = [\n  Function(\n    arguments=[], source='a:b')]\n",
            "SPEC:3: Function needs name; give name=...",
        ),
        (
            "import aot.spec\naot.spec.Tensor()\n",
            "SPEC:2: Tensor needs name, dtype, shape; give name=..., dtype=..., shape=...",
        ),
        ("class Tensor:\n    def __init__(self): pass\nTensor(align=16)\n", "SPEC:3: TypeError: Tensor.__init__()"),
        ("x = 1\n\0", "SPEC: has null bytes, so it is no spec; a spec is a Python file"),
        ("CUTEAOT\0\1\0\0\0", "SPEC: is an archive, not a spec; a spec is a Python file"),
        (HEAD, "SPEC: needs a list called functions, found None"),
        ("functions = []\n", "SPEC: needs a list called functions, found []"),
        ("functions = [5]\n", "SPEC: functions must be aot.spec.Function objects, found 5"),
        (WHOLE + "functions *= 2\n", "SPEC: two functions are called 'f'; rename one"),
    ],
)
def test_a_spec_that_cannot_be_used_is_one_line_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    spec = tmp_path / "spec.py"
    spec.write_text(text)
    with pytest.raises(SpecError, match=f"^{re.escape(message.replace('SPEC', str(spec)))}") as caught:
        spec_file.load(spec)
    assert "\n" not in str(caught.value)


def test_a_spec_that_is_named_from_its_folder_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spec.py").write_text("x = 1\nx.y\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        spec_file.load(Path("spec.py"))
    assert str(caught.value).count("spec.py") == 1


def test_warnings_of_a_spec_are_shown_by_the_process_that_reads_it_and_by_none_that_builds(tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text("import warnings\nwarnings.warn('old')\n" + WHOLE)
    with pytest.warns(UserWarning, match="old"):
        spec_file.load(tmp_path / "spec.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec_file.load(tmp_path / "spec.py", lasting=True).functions


def test_a_spec_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no.py", tmp_path):
        with pytest.raises(SpecError, match=f"^{re.escape(str(path))}: cannot be read"):
            spec_file.load(path)


def test_a_spec_may_import_what_is_beside_it_and_changes_no_path(tmp_path: Path) -> None:
    (tmp_path / "beside_the_spec.py").write_text("NAME = 'g'\n")
    (tmp_path / "spec.py").write_text(
        WHOLE.replace("'f',", "beside_the_spec.NAME,").replace(HEAD, HEAD + "import beside_the_spec\n")
    )
    before = list(sys.path)
    assert [f.name for f in spec_file.load(tmp_path / "spec.py").functions] == ["g"]
    assert sys.path == before


def test_a_spec_is_compiled_as_it_is_alone(tmp_path: Path) -> None:
    """Without the future imports of whoever reads it: annotations that the DSL asks for are values."""
    (tmp_path / "spec.py").write_text(f"{WHOLE}def f() -> dict: ...\nassert f.__annotations__['return'] is dict\n")
    assert [f.name for f in spec_file.load(tmp_path / "spec.py").functions] == ["f"]


def test_the_example_is_read_without_the_dsl_quack_or_torch() -> None:
    absent = "import sys; sys.modules.update(dict.fromkeys(['torch', 'cutlass', 'quack', 'triton'])); "
    code = (
        absent
        + "from pathlib import Path; from aot.providers.spec_file import load; load(Path('examples/quack/spec.py'))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- choosing, and what is compiled ---


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a spec of two functions from a module beside it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "mine" / "norm.py").write_text("def run(): pass\n")
    text = HEAD + "def one(name, **more): return Function(name, [Tensor('x', 'f32', ('n',)), Stream()], **more)\n"
    text += "functions = [one('a', source='mine.norm:run', targets=['sm_90a', 'sm_100a']),\n"
    text += "             one('b', make=print, variants={'t1': {'t': 1}, 't2': {'t': 2}})]\n"
    (tmp_path / "spec.py").write_text(text)
    return tmp_path


def test_words_choose_functions_by_name_or_source(package: Path) -> None:
    spec = spec_file.load(package / "spec.py")
    assert [[f.name for f in spec_file.chosen(spec, words)[0]] for words in ([], ["b"], ["mine.norm:run"])] == [
        ["a", "b"],
        ["b"],
        ["a"],
    ]
    assert spec_file.chosen(spec, ["a", "softmax"]) == ([spec.function("a")], ["softmax"])
    with pytest.raises(
        SpecError, match=r"has no function 'mine.norm:runs'; did you mean 'mine.norm:run'\? known: mine"
    ):
        spec_file.chosen(spec, ["mine.norm:runs"])


def test_each_variant_is_compiled_for_each_target_that_its_function_is_for(package: Path) -> None:
    spec = spec_file.load(package / "spec.py")
    found = spec_file.compilable(spec, spec.functions, ["sm_90a", "sm_80"])
    assert [f.name() for f in found] == ["a.sm_90a", "b.t1.sm_90a", "b.t2.sm_90a", "b.t1.sm_80", "b.t2.sm_80"]
    assert [f.name() for f in spec_file.compilable(spec, spec.functions[:1], [])] == ["a.sm_90a", "a.sm_100a"]
    assert len({canonical.digest(f.to_json()) for f in found}) == len(found)
    with pytest.raises(SpecError, match="function 'a': not for sm_80: its targets are sm_90a, sm_100a"):
        spec_file.compilable(spec, spec.functions[:1], ["sm_80"])
    with pytest.raises(SpecError, match="function 'b': it names no targets; give --target"):
        spec_file.compilable(spec, spec.functions[1:], [])


def test_the_key_follows_the_spec_and_the_package_of_the_function_and_not_where_they_lie(
    package: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def key(folder: Path) -> Any:
        spec = spec_file.load(folder / "spec.py")
        found = spec_file.compilable(spec, spec.functions[:1], ["sm_90a"])[0]
        return canonical.digest(found.to_json()), found.source_digest()

    keys = [key(package)]
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "moved"
    subprocess.run(["cp", "-r", package, elsewhere], check=True)
    assert key(elsewhere) == keys[0]
    (package / "spec.py").write_text((package / "spec.py").read_text() + "# a remark\n")
    keys.append(key(package))
    (package / "mine" / "__init__.py").write_text("raise AssertionError\n")
    keys.append(key(package))
    assert len({part for both in keys for part in both}) == 2 * len(keys)


def test_a_function_from_nowhere_is_named(package: Path) -> None:
    text = (package / "spec.py").read_text()
    for source, message in (
        ("mine.norms:run", "there is no module 'mine.norms'; install what it is in, or put it beside the spec"),
        ("mine.norm.run:x", "'mine.norm' is a module, not a package, so it has no 'run'"),
    ):
        (package / "spec.py").write_text(text.replace("mine.norm:run", source))
        spec = spec_file.load(package / "spec.py")
        with pytest.raises(SpecError, match=f"^{re.escape(str(spec.path))}: function 'a': {message}"):
            spec_file.compilable(spec, spec.functions[:1], ["sm_90a"])


def test_an_installed_module_is_known_by_its_distribution() -> None:
    found = origin("pytest", sys.path)
    assert (found.name, found.version) == ("pytest", pytest.__version__)
    assert found.digest == origin("_pytest.python", sys.path).digest  # the same distribution
    assert found.digest != origin("hypothesis", sys.path).digest
