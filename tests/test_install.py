"""What an install must bring: each package that a command imports is a dependency, and a missing one is named."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from aot.__main__ import _MISSING
from aot.extras import to_install
from runtime.container.archive import Archive

from .command_line import ROOT
from .distributions import brought_by, normal, project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

# Distributions whose packages are imported by another name.
_DISTRIBUTIONS = {"yaml": "pyyaml", "cutlass": "nvidia-cutlass-dsl", "nvMatmulHeuristics": "nvidia-matmul-heuristics"}
_INSPECTION = ["__main__.py", "cli/*.py", "cli/commands/*.py", "inspect/**/*.py"]


def _names(requirements: Iterable[str]) -> set[str]:
    return {normal(Requirement(text).name) for text in requirements}


def _imported(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere, but for the standard library and our own."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
    found = {name.partition(".")[0] for name in found}
    return found - set(sys.stdlib_module_names) - {"aot", "runtime"}


# Runs commands where nothing of `BLOCKED` can be imported; prints what each exits with, and says on standard error.
_LOOK = """
import contextlib, io, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError("import of " + name, name=name)

sys.meta_path.insert(0, Refuse())
from aot.__main__ import main

said = {}
for words, arguments in COMMANDS.items():
    sys.argv = ["aot", *arguments]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as exit:
            said[words] = [exit.code or 0, errors.getvalue()]
print(json.dumps(said))
"""


LOOKS = [
    "--help",
    "info ARCHIVE",
    "ls ARCHIVE",
    "show ARCHIVE up",
    "explain ARCHIVE up --m 7",
    "diff ARCHIVE ARCHIVE",
    "history ARCHIVE",
    "coverage ARCHIVE MANIFEST",
    "report ARCHIVE --json",
    "extract ARCHIVE FUNCTION --resources",
    "prune ARCHIVE -o OUT --gemm up",
    "merge ARCHIVE ARCHIVE -o OUT",
    "cache info",
    "verify ARCHIVE",
    "build --help",
]


@pytest.fixture(scope="module")
def looked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The status of each of `LOOKS` and its standard error, all from one process with the base dependencies alone."""
    brought = brought_by(project()["dependencies"])
    installed = metadata.packages_distributions()
    blocked = {name for name, homes in installed.items() if not {normal(home) for home in homes} & brought}
    assert {"torch", "cutlass"} <= blocked
    archive, empty = folder / "tiny.aot", tmp_path_factory.mktemp("looked")
    with Archive.open(archive) as opened:
        function = next(iter(opened.functions))
    words = {"ARCHIVE": archive, "MANIFEST": archive.with_suffix(".yaml"), "FUNCTION": Path(function)}
    commands: dict[str, list[str]] = {}
    for number, command in enumerate(LOOKS):
        words["OUT"] = empty / f"{number}.aot"
        commands[command] = [str(words.get(word, word)) for word in command.split()]
    program = f"BLOCKED = {blocked - {'aot', 'runtime'}!r}\nCOMMANDS = {commands!r}\n{_LOOK}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(empty)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("command", LOOKS)
def test_archives_are_looked_at_with_base_dependencies_alone(looked: dict[str, list[Any]], command: str) -> None:
    assert looked[command] == [0, ""]


def test_what_looks_at_archives_imports_base_dependencies_alone() -> None:
    files = [path for pattern in _INSPECTION for path in (ROOT / "aot").glob(pattern)]
    needed = {_DISTRIBUTIONS.get(name, name) for path in files for name in _imported(path)}
    assert needed <= _names(project()["dependencies"])


def test_the_runtime_imports_zstandard_and_orjson_alone() -> None:
    files = [
        path
        for path in (ROOT / "runtime").rglob("*.py")
        if not {"torch", "vllm", "sglang", "plugin", "signing"} & {*path.relative_to(ROOT).parts}
    ]
    assert set().union(*map(_imported, files)) == {"zstandard", "orjson"}


def test_only_signatures_import_what_knows_them() -> None:
    files = [path for package in ("aot", "runtime") for path in (ROOT / package).rglob("*.py")]
    using = {path.parent.relative_to(ROOT) for path in files if {"securesystemslib", "cryptography"} & _imported(path)}
    assert using == {Path("aot/sign"), Path("runtime/signing")}


def test_every_import_is_a_dependency_that_a_message_can_name() -> None:
    imported = set().union(*map(_imported, (*ROOT.glob("aot/**/*.py"), *ROOT.glob("runtime/**/*.py"))))
    imported -= {"transformers"}  # whose experts are registered where it is: `register_experts` says so if it is not
    found = project()
    extras = found["optional-dependencies"]
    declared = _names([*found["dependencies"], *extras["tune"], *extras["build"], *extras["report"], *extras["sign"]])
    assert {_DISTRIBUTIONS.get(name, name) for name in imported} <= declared
    optional = {"nvMatmulHeuristics"}  # `aot.search.rank` goes on without it
    assert imported - optional <= set(_MISSING)
    assert {_DISTRIBUTIONS.get(name, name) for name in _MISSING} <= declared


def _with_import_hook(action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where importing one of some packages does what `action` says."""
    program = (
        "import sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        {action}\n"
        "sys.meta_path.insert(0, Hook())\n"
        f"sys.argv = {['aot', *arguments]!r}\n"
        "from aot.__main__ import main\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_control_c_while_importing_is_quiet() -> None:
    done = _with_import_hook("if name == 'typer': raise KeyboardInterrupt", "ls", "x.aot")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("package", "arguments", "remedy"),
    [
        ("typer", ["--version"], "pip install '.' in a checkout"),
        ("orjson", ["ls", "x.aot"], "pip install '.' in a checkout"),
        ("yaml", ["build", "manifests/llama-3.1-8b.yaml", "-o", "never-written.aot"], "pip install '.' in a checkout"),
        ("torch", ["tune", "ARCHIVE", "-o", "never-written.aot"], "pip install '.[tune]' in a checkout"),
        ("jinja2", ["report", "ARCHIVE", "-o", "never-written.html"], "pip install '.[report]' in a checkout"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    archive: Path, package: str, arguments: list[str], remedy: str
) -> None:
    action = f"if name == {package!r}: raise ModuleNotFoundError(name, name=name)"
    done = _with_import_hook(action, *(str(archive) if word == "ARCHIVE" else word for word in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {package} is not installed; {remedy}")
    assert done.stderr.count("\n") == 1


def test_the_extra_that_a_message_names_brings_the_package() -> None:
    found = project()
    brought = {extra: _names(of) for extra, of in found["optional-dependencies"].items()}
    brought[""] = _names(found["dependencies"])
    lacking = [name for name, extra in _MISSING.items() if _DISTRIBUTIONS.get(name, name) not in brought[extra]]
    assert lacking == []


def test_what_a_message_says_to_install_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert to_install().startswith("pip install '.' in")
    assert "pip install ." in readme
    for extra in {*_MISSING.values()} - {""}:
        assert f"'.[{extra}]'" in to_install(extra)
        assert f"'.[{extra}]'" in readme


def test_the_extra_that_builds_holds_the_one_that_tunes() -> None:
    found = project()
    assert "cute-aot[tune]" in found["optional-dependencies"]["build"]
    assert found["scripts"] == {"aot": "aot.__main__:main"}


@pytest.mark.parametrize("package", ["aot", "runtime"])
def test_packages_carry_their_types(package: str) -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data[package]
    assert (ROOT / package / "py.typed").is_file()


def test_what_a_report_is_made_of_comes_with_an_install() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["aot"]
    brought = {path for pattern in patterns for path in (ROOT / "aot").glob(pattern)}
    there = {path for path in (ROOT / "aot" / "report").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert there
    assert there <= brought


def test_the_license_is_there_in_full() -> None:
    assert project()["license-files"] == ["LICENSE", "aot/report/uplot/LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_native_code_is_built_again_when_any_header_changes() -> None:
    (module,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    for ends, said in ((".h", module["depends"]), (".c", module["sources"])):
        assert said == sorted(f"runtime/native/{path.name}" for path in (ROOT / "runtime" / "native").glob(f"*{ends}"))
