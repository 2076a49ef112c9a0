"""`scripts/check_serving.py` against a server that answers as vLLM's does, and what it finds wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .test_recorded import worker

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import check_serving  # noqa: E402

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

case = os.environ["CASE"]
words = sys.argv[1:]
assert words[0] == "serve" and words[-2:] == ["--max-model-len", "4096"], words
if case == "dies":
    sys.exit("out of memory")
setting = json.loads(words[words.index("--additional-config") + 1])["cute_aot"]
assert setting["archive"] == ["universal", "model.aot"]
if case != "no line":
    print("INFO cute-aot 0.1.0: model.aot (12) serves 2 of 2 linear layers", flush=True)
served = []


class Handler(BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        assert os.environ["PROMETHEUS_MULTIPROC_DIR"]
        launches = 'cute_aot_launches_total{function="a",rank="0"} %d.0' % (0 if case == "no launch" else len(served))
        misses = "# HELP cute_aot_misses_total of\\ncute_aot_misses_total{signature=\\"s\\"} 3.0"
        lines = "vllm_tokens 5.0", launches, launches, misses if case == "miss" else ""
        self.answer("" if self.path == "/health" else "\\n".join(lines))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if case == "refuses":
            return self.send_error(500)
        if case == "falls":
            os._exit(1)
        served.append(len(asked["prompt"]))
        self.answer(json.dumps({"usage": {"completion_tokens": asked["max_tokens"]}}))

    def log_message(self, *_):
        pass


records = Path(setting["record"])
records.mkdir()
if case != "no record":
    (records / "worker-0-0.json").write_text(os.environ["WORKER"])
ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Checks a server that does what a case says; the exit status."""
    entry = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    entry.mkdir(parents=True)
    for folder in (entry, entry.parent, entry.parent.parent):
        (folder / "__init__.py").touch()
    (entry / "main.py").write_text(SERVER)
    (tmp_path / "model").mkdir()
    for name, text in (("config.json", '{"vocab_size": 8}'), ("tokenizer.json", "{}")):
        (tmp_path / "model" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path / "site")]))
    monkeypatch.setenv("WORKER", json.dumps(worker()))
    monkeypatch.setattr(check_serving, "METRICS_S", 0.0)

    def made(case: str) -> int:
        monkeypatch.setenv("CASE", case)
        words: list[Any] = [tmp_path / "model", "--archive", "universal", "--archive", "model.aot", "--requests", 5]
        words += ["--timeout", 60, "--out", tmp_path / "found.json", "--engine", "--max-model-len", 4096]
        monkeypatch.setattr(sys, "argv", ["check_serving.py", *map(str, words)])
        return check_serving.main()

    return made


def test_a_round_is_what_a_user_sees(run: Callable[[str], int], tmp_path: Path) -> None:
    assert run("as it should") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["line"] == "cute-aot 0.1.0: model.aot (12) serves 2 of 2 linear layers"
    assert found["tokens"] == 5 * check_serving.ANSWER_TOKENS
    assert found["metrics"] == {"cute_aot_launches_total": 10.0}, "of all labels"
    assert found["manifest_gemms"] == 5
    assert found["model"] == "model"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("dies", "vLLM did not come up; the end of its log:\nout of memory"),
        ("no line", "has no line that says what the archive serves"),
        ("refuses", "a request of"),
        ("falls", "a request of"),
        ("no launch", "/metrics counts no launches"),
        ("miss", "/metrics counts 3 misses"),
        ("no record", "records make no manifest: error: "),
    ],
)
def test_what_a_user_would_not_get_is_said(
    run: Callable[[str], int], capsys: pytest.CaptureFixture[str], case: str, said: str
) -> None:
    assert run(case) == 1
    assert f"not served: {said}" in capsys.readouterr().out.replace("vLLM's log has", "has")


def test_a_model_without_a_tokenizer_gets_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text('{"vocab_size": 40, "model_type": "llama"}')
    check_serving._give_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode([7, 39]).split() == ["t7", "t39"]
