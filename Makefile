# Every target works on a machine that has only python3 (3.11 or newer), pip and make.
#   make demo   the main job        make test   the tests        make check   what a change must pass

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PROJECT := pyproject.toml constraints.txt

.PHONY: demo test gpu-test bench lint format types check clean

demo: $(VENV)/.test
	@$(BIN)/graphdispatch demo $(ARGS)

test: $(VENV)/.test
	@$(BIN)/python -m pytest $(ARGS)

gpu-test: $(VENV)/.test
	@$(BIN)/python -m pytest tests/gpu $(ARGS)

bench: $(VENV)/.test
	@$(BIN)/python -m benchmarks $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet

types: $(VENV)/.dev
	@$(BIN)/mypy

check: lint types test

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks

# Some systems ship venv without ensurepip; there the system's pip fills the environment.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graphdispatch needs Python 3.11 or newer")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check -qq install pip; }
	@touch $@

# Torch comes first and pinned, so that nothing else can choose another build of it.
$(VENV)/.torch: $(VENV)/.made constraints.txt
	@echo "installing torch (once, some minutes)"
	@$(PIP) install --constraint constraints.txt torch
	@touch $@

$(VENV)/.test: $(VENV)/.torch $(PROJECT)
	@echo "installing graphdispatch"
	@$(PIP) install --constraint constraints.txt --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@echo "installing the development tools"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@
