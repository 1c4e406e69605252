# Every target works on a machine that has only python3 (3.11 or newer), pip and make.
#   make demo   the main job        make test   the tests        make check   what a change must pass

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PROJECT := pyproject.toml constraints.txt

.PHONY: demo test gpu-test gpu-emulated gpu-bench bench lint format types check clean

demo: $(VENV)/.test
	@$(BIN)/graphdispatch demo $(ARGS)

test: $(VENV)/.test
	@$(BIN)/python -m pytest $(ARGS)

# On a GPU: GPU_PYTHON=python3 takes a python that has torch with CUDA, and pytest and hypothesis, instead of $(VENV).
ifdef GPU_PYTHON
gpu-test gpu-bench: export PYTHONPATH := src
else
GPU_PYTHON := $(BIN)/python
gpu-test gpu-bench: $(VENV)/.test
endif

gpu-test:
	@$(GPU_PYTHON) -c 'import torch; torch.cuda.is_available() or exit("gpu-test needs a CUDA device; none found")'
	@$(GPU_PYTHON) -m pytest tests/gpu tests/conformance $(ARGS)
	@GRAPHDISPATCH_TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest tests/property/test_piecewise.py tests/property/test_threads.py \
		tests/property/test_graphed_sequences.py tests/property/test_wrapper_sequences.py $(ARGS)

# Without a GPU: GPU_PYTHON is a python that has a CUDA 13 build of torch with its CUDA packages; it takes g++ besides.
gpu-emulated: export PYTHONPATH := src:tests/emulator
gpu-emulated:
	@tests/emulator/build.sh $(GPU_PYTHON) build/emulator
	@LD_PRELOAD=$(CURDIR)/build/emulator/libcudart.so.13 LD_LIBRARY_PATH=build/emulator GRAPHDISPATCH_TEST_DEVICE=cuda \
		$(GPU_PYTHON) -m pytest -p emulated_cuda tests/gpu tests/conformance tests/property/test_piecewise.py \
		tests/property/test_graphed_sequences.py tests/property/test_wrapper_sequences.py $(ARGS)

gpu-bench:
	@$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

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
