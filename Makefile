# Two commands for a fresh machine: `make demo` and `make test`. Each makes its own environment first.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
OUT ?= build/llama-3.1-8b.aot

.PHONY: demo test lint clean

# Build a real model's archive and list it. No GPU is needed; with one, the archive is tuned on it too.
# --force: a second demo replaces the first, which may be tuned.
demo: $(VENV)/ready
	mkdir -p $(dir $(OUT))
	$(BIN)/aot build manifests/llama-3.1-8b.yaml -o $(OUT) --force
	$(BIN)/aot ls $(OUT)

# Lint, types and every test; those that need a GPU are skipped, visibly, where there is none.
test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch first and pinned: any newer one would do, but this is the one the tests ran with.
$(VENV)/ready: pyproject.toml $(wildcard runtime/native/*.c runtime/native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[build,test]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
