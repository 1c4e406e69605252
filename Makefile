# Works on a machine that has only python3 (3.11 or newer), pip and make. Everything else is installed into .venv.
# CONTRIBUTING.md lists the rarer jobs of make/jobs.mk: sweeps, fuzzing, sanitizers, emulated GPUs, packages.

include make/environments.mk

# One process for each core. A process that has run its share takes tests from the others, so that all end together.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest $(PARALLEL)

.DEFAULT_GOAL := demo
.PHONY: demo quick test check format docs bench gpu-test clean help

demo: $(VENV)/.native ## a decoder under changing batch sizes, eager beside graphs
	@$(BIN)/graphdispatch demo $(ARGS)

quick: $(VENV)/.native ## the tests to run while you work: under a minute
	@$(PYTEST) $(QUICK) $(ARGS)

test: $(VENV)/.native ## the tests; ARGS="tests/runtime -k sizes" for some of them
	@$(PYTEST) $(ARGS)

check: lint types test ## what a change must pass

format: $(VENV)/.dev ## format, and fix what can be fixed
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet

docs: $(VENV)/.docs $(VENV)/.native ## the documentation as a site, in build/site
	@$(BIN)/python -m pytest tests/contract/test_documents.py $(ARGS)
	@$(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

bench: $(VENV)/.native ## ratios measured in one run
	@$(BIN)/python -m benchmarks $(ARGS)

gpu-test: ## the tests that need a CUDA device; GPU_PYTHON=python3 names a python with torch for CUDA
	@$(GPU_PYTHON) -c 'import torch; torch.cuda.is_available() or exit("gpu-test needs a CUDA device; none found")'
	@$(GPU_PYTHON) -m pytest $(ON_DEVICE) $(ARGS)
	@GRAPHDISPATCH_TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest $(ON_ANY_DEVICE) tests/soak $(ARGS)

clean: ## remove environments and builds
	@rm -rf $(VENV) $(CUDA_VENV) $(VLLM_VENV) $(DRIFT_VENV) $(REAL_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

help: # this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1:\2/p' Makefile | awk -F: '{ printf "make %-9s %s\n", $$1, $$2 }'

include make/jobs.mk
