"""A server's round with an archive, as a user goes it: `vllm serve`, requests, /metrics, a manifest of what ran.

    python scripts/check_serving.py MODEL --archive universal --archive model.aot --out build/serving.json

MODEL is a folder with a config.json; weights are vLLM's dummies, and where it has no tokenizer one of made-up words is
put beside it, in a copy. vLLM and this project must be installed, so that vLLM finds the plugin by its entry point. The
server records what it runs. `--requests` of random lengths are sent, eight at a time. The exit status is 1 where the
server does not come up within --timeout seconds or does not say that the archive serves it, where a request fails,
where /metrics has no launches of the archive's or counts misses, and where its records make no manifest.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import ends, out_argument, version, write
from traffic import log_uniform

from runtime.errors import ArgumentError
from runtime.plugin.metrics import FOLDER
from runtime.plugin.settings import KEY

AT_ONCE, PROMPT_TOKENS, ANSWER_TOKENS, WORDS = 8, (4, 1500), 16, (10, 30000)
WEIGHTS = "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf"
METRICS_S = 6.0  # a worker writes its figures every five seconds
_SAMPLE = re.compile(r"^(cute_aot_\w+?)(?:\{.*\})? ([0-9.e+-]+)$", re.MULTILINE)


class NotServedError(Exception):
    """What a user would not have got."""


def main() -> int:
    options = _options().parse_args()
    if not (options.model / "config.json").is_file():
        raise ArgumentError(f"{options.model}: has no config.json; name the folder of a model")
    try:
        found = check(options)
    except NotServedError as error:
        print(f"not served: {error}")
        return 1
    for name, value in found.items():
        print(f"{name:40} {value}")
    environment = {name: version(name) for name in ("vllm", "torch", "cute-aot")}
    write(options.out, environment, model=options.model.name, **found)
    return 0


def check(options: argparse.Namespace) -> dict[str, Any]:
    """What a round gave.

    Raises:
        NotServedError: something of it did not.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Path(folder)
        shutil.copytree(options.model, work / "model", ignore=shutil.ignore_patterns(*WEIGHTS))
        _give_tokenizer(work / "model")
        began = time.monotonic()
        server = stack.enter_context(_served(options, work))
        server.await_health(began + options.timeout)
        found: dict[str, Any] = {"ready_s": round(time.monotonic() - began, 1), "line": server.line()}
        found["tokens"] = sum(server.answers(options.requests))
        time.sleep(METRICS_S)
        found["metrics"] = counted = server.metrics()
        stack.close()  # the server ends, and its workers write their last records
        found["manifest_gemms"] = _recorded(work)
    if not counted.get("cute_aot_launches_total"):
        raise NotServedError(f"/metrics counts no launches: {counted}")
    if misses := counted.get("cute_aot_misses_total"):
        raise NotServedError(f"/metrics counts {misses:.0f} misses")
    return found


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[bytes]
    url: str
    model: str
    log: Path

    def await_health(self, until: float) -> None:
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise NotServedError(f"vLLM did not come up; the end of its log:\n{self.log.read_text()[-2000:]}")

    def line(self) -> str:
        """What the plugin said of the layers that it serves."""
        said = re.search(r"cute-aot \S+: .* serves .*", self.log.read_text())
        if said is None:
            raise NotServedError("vLLM's log has no line that says what the archive serves")
        return said[0]

    def answers(self, count: int) -> list[int]:
        """How many tokens each of so many requests was answered with."""
        draw = random.Random(count)
        prompts = [[draw.randrange(*WORDS) for _ in range(log_uniform(draw, *PROMPT_TOKENS))] for _ in range(count)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._answer, prompts))

    def _answer(self, prompt: list[int]) -> int:
        asked = {"model": self.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(asked).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return int(json.load(answer)["usage"]["completion_tokens"])
        except (OSError, http.client.HTTPException) as error:
            raise NotServedError(f"a request of {len(prompt)} tokens: {error}") from error

    def metrics(self) -> dict[str, float]:
        """The archive's figures, those of all labels added up."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
                text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise NotServedError(f"/metrics: {error}") from error
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found


@contextlib.contextmanager
def _served(options: argparse.Namespace, work: Path) -> Iterator[_Server]:
    """A server of the model in a folder, until it is told to end and has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (work / "metrics").mkdir()
    setting = {KEY: {"archive": options.archive, "record": str(work / "records")}}
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(work / "model"), "--load-format", "dummy"]
    words += ["--port", str(port), "--additional-config", json.dumps(setting), *options.engine]
    log = work / "server.log"
    with log.open("wb") as to:
        environment = os.environ | {FOLDER: str(work / "metrics")}
        process = subprocess.Popen(words, stdout=to, stderr=to, env=environment, start_new_session=True)
    try:
        yield _Server(process, f"http://127.0.0.1:{port}", str(work / "model"), log)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _recorded(work: Path) -> int:
    """How many GEMMs the manifest of what the server ran has."""
    words = [
        sys.executable,
        "-m",
        "aot",
        "manifest",
        "from-server",
        str(work / "records"),
        "-o",
        str(work / "seen.yaml"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NotServedError(f"records make no manifest: {done.stderr.strip()}")
    from aot.problem import manifest

    return len(manifest.load(work / "seen.yaml").gemms)


def _give_tokenizer(model: Path) -> None:
    """Put a tokenizer beside a model that has none: a word for each of its tokens."""
    if any((model / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(json.loads((model / "config.json").read_text())["vocab_size"])}
    made = Tokenizer(models.WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="t0", bos_token="t1", eos_token="t2").save_pretrained(
        model
    )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with the config.json of a model")
    parser.add_argument("--archive", action="append", required=True, help='"universal" or a path; repeat for layers')
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--timeout", type=float, default=600, help="seconds until the server must be up")
    parser.add_argument(
        "--engine", nargs=argparse.REMAINDER, default=[], help="further words of vllm serve, to the end"
    )
    out_argument(parser)
    return parser


if __name__ == "__main__":
    sys.exit(ends(main))
