# For a fresh machine: `make demo`, `make test` and `make test-all`. Each makes its own environment first.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
OUT ?= build/llama-3.1-8b.aot

# Tests run in as many processes as there are cores; one that is done takes tests from those that are not.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test test-all lint clean

# Build a real model's archive and list it. No GPU is needed; with one, the archive is tuned on it too.
# --force: a second demo replaces the first, which may be tuned.
demo: $(VENV)/ready
	mkdir -p $(dir $(OUT))
	$(BIN)/aot build manifests/llama-3.1-8b.yaml -o $(OUT) --force
	$(BIN)/aot ls $(OUT)

# Tests start hundreds of processes: where this is set, as in many containers, each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Lint, types and tests; those that need a GPU are skipped, visibly, where there is none.
test: lint
	$(PYTEST) -m "not long"

# The same, and then the sweeps that take a minute or so each.
test-all: test
	$(PYTEST) -m long

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch first and pinned: any newer one would do, but this is the one the tests ran with.
$(VENV)/ready: pyproject.toml $(wildcard runtime/native/*.c runtime/native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[build,test,wheels]'
	touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
