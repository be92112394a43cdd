# Every task of the project. CI calls the same verbs. `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
LOWEST_PYTHON ?= 3.11

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
LOWEST := .venv-lowest
DOCUMENTS := $(wildcard README.md ARCHITECTURE.md docs)
SOURCES := sits_dagster tests $(wildcard benchmarks examples conftest.py)

# Use the machine's Python, never download one.
export UV_PYTHON_DOWNLOADS := never
UV := $(BIN)/uv

# pytest exits 5 when it finds no test, which is no failure for an optional set of tests.
NONE_IS_FINE := || [ $$? -eq 5 ]

.PHONY: help setup demo ui test test-lowest check format lock bench clean

help:  ## List the verbs
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv with the locked packages and this one, editable

$(STAMP): requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "sits-dagster needs Python 3.11 or newer, but $(PYTHON) is" \
			"$$($(PYTHON) --version 2>&1 || true). Hint: make setup PYTHON=python3.12" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@version=$$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' requirements-dev.lock); \
	if [ "$$($(UV) --version 2>/dev/null | cut -d' ' -f2)" != "$$version" ]; then \
		$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
		awk '/^[^ ]/ {mine = /^uv==/} mine && !/#/' requirements-dev.lock > $(VENV)/uv.txt; \
		$(BIN)/python -m pip install --quiet --quiet --no-deps --require-hashes --requirement $(VENV)/uv.txt; \
	fi
	$(UV) pip sync --quiet --python $(BIN)/python --require-hashes --compile-bytecode requirements-dev.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup  ## Run the demo
	$(BIN)/sits demo

ui: setup  ## Open the demo in Dagster's UI
	@mkdir -p "$${SITS_DEMO_HOME:-.sits}/dagster"
	DAGSTER_HOME="$$(cd "$${SITS_DEMO_HOME:-.sits}/dagster" && pwd)" $(BIN)/dagster dev -p 3000 -m sits_dagster.definitions

test: setup  ## Run the tests: the fast ones in parallel, then those with real Dagster processes
	$(BIN)/pytest -n logical -m "not dagster and not slow and not gpu"
	$(BIN)/pytest -m "dagster and not slow and not gpu" $(NONE_IS_FINE)

test-lowest: setup  ## Run the fast tests with the lowest versions that pyproject.toml allows
	$(UV) venv --quiet --clear --python $(LOWEST_PYTHON) $(LOWEST)
	$(UV) pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[cpu,demo,dev,triton]'
	$(LOWEST)/bin/python -m pytest -n logical -o filterwarnings=default -m "not dagster and not slow and not gpu"

check: setup  ## Check format, lint, types, import contracts, documents and spelling
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo --cache-dir $(VENV)/.import_linter_cache
	$(BIN)/pytest -q --doctest-modules $(DOCUMENTS) sits_dagster $(NONE_IS_FINE)
	$(BIN)/codespell

format: setup  ## Format, and mend what ruff can mend
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lock: export UV_CUSTOM_COMPILE_COMMAND := make lock
lock: COMPILE := $(UV) pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	--group lock --extra cpu --extra demo --extra ui
lock: setup  ## Resolve requirements.lock and requirements-dev.lock again (UPGRADE=--upgrade for newer releases)
	$(COMPILE) $(UPGRADE) --output-file requirements.lock
	$(COMPILE) $(UPGRADE) --extra s3 --extra triton --extra dev --output-file requirements-dev.lock

bench: setup  ## Measure throughput, as JSON
	$(BIN)/python benchmarks/throughput.py --json

clean:  ## Remove caches, builds and the virtual environments
	rm -rf $(VENV) $(LOWEST) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
