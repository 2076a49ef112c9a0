"""Providers of other distributions: found by entry point, and one clear error where one is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from aot.search import legal
from aot.search.provider import PROVIDERS, ProviderError, home, provider, provider_names
from aot.selection import select
from runtime.errors import AotError
from runtime.gemm.signature import Signature

GOOD = """
from aot.search.legal import legal_functions
from aot.search.variants import Family

class Provider:
    name = "others"
    families = {"soft": Family("softmax", ("sm_90a",), (("f32", "f32", "f32"),), {"threads": (128,)}, batched=(False,))}

    def variants(self, target, signature):
        return []

    def functions(self, target):
        return legal_functions(self.name, target)

    def source_digest(self, family):
        return "ab"

    def build(self, variant):
        raise AssertionError
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path that distributions can be put into."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def distribution(folder: Path, module: str, code: str, name: str = "others", value: str = "Provider") -> None:
    """Put a distribution there, which has one provider."""
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}_kernels-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}-kernels\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[cute_aot.providers]\n{name} = {module}:{value}\n")


def test_a_provider_of_another_distribution_is_one_of_the_providers(install: Path) -> None:
    distribution(install, "made_up_a", GOOD)
    assert provider_names() == (*PROVIDERS, "others")
    assert provider("others").source_digest("soft") == "ab"
    (variant,) = select([], ["sm_90a"], functions=["softmax"]).functions
    assert variant.name() == "others.soft.f32_f32_f32_f32.threads128.sm_90a"
    assert legal.of_name(variant.name()) == variant
    assert home(variant) == "others"  # a compiler of its own, which its code may change


def test_providers_of_this_project_share_a_process_of_the_compiler() -> None:
    gemm = Signature("bf16", "bf16", "bf16", "f32", "none", 512, 512)
    assert {home(v) for name in PROVIDERS for v in provider(name).variants("sm_90a", gemm)} == {""}


@pytest.mark.parametrize(
    ("code", "value", "message"),
    [
        ("import no_such_module", "Provider", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "Provider", "ZeroDivisionError: division by zero"),
        (GOOD, "Provder", "AttributeError: module .* has no attribute 'Provder'"),
        ("class Provider:\n    def __init__(self, x): pass", "Provider", "TypeError: .*missing 1 required positional"),
        (
            "class Provider:\n    name = 'others'",
            "Provider",
            "has no families, variants, functions, source_digest, build",
        ),
        (GOOD.replace('"others"', '"mine"'), "Provider", "calls itself 'mine', which its variants then say"),
    ],
)
def test_a_broken_provider_is_one_error_that_names_its_distribution(
    install: Path, request: pytest.FixtureRequest, code: str, value: str, message: str
) -> None:
    module = f"broken_{abs(hash((code, value)))}"
    distribution(install, module, code, value=value)
    where = rf"distribution {module}-kernels 1\.2: its provider 'others' \({module}:{value}\)"
    with pytest.raises(
        ProviderError, match=rf"{where} .*{message}.*; mend that distribution, or uninstall it$"
    ) as caught:
        provider("others")
    assert "\n" not in str(caught.value)
    with pytest.raises(ProviderError, match=where):
        select([], ["sm_90a"], functions=["softmax"])


def test_a_name_that_is_taken_is_an_error_that_names_both(install: Path) -> None:
    distribution(install, "made_up_b", GOOD, name="own")
    with pytest.raises(ProviderError, match=r"made_up_b-kernels 1\.2: its provider 'own' has the name of one of this"):
        provider_names()
    assert provider("own").name == "own"


def test_two_distributions_cannot_have_one_name(install: Path) -> None:
    distribution(install, "made_up_c", GOOD)
    distribution(install, "made_up_d", GOOD)
    with pytest.raises(ProviderError, match=r"distribution made_up_[cd]-kernels 1\.2: .* of distribution made_up_[cd]"):
        provider_names()


def test_an_unknown_provider_is_told_all_that_there_are(install: Path) -> None:
    distribution(install, "made_up_e", GOOD)
    with pytest.raises(AotError, match="the providers are cutlass_operators, own, others"):
        provider("nobody")
