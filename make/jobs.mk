# Rarer jobs. CONTRIBUTING.md says when to run them.

.PHONY: lint types sweep fuzz generate-test vllm-test vllm-families drift real gpu-emulated gpu-bench gpu-all native-check native-twins docs-serve package
.PHONY: mutants count device-test soak

# What runs on a device, and what runs on whichever device GRAPHDISPATCH_TEST_DEVICE names.
ON_DEVICE := tests/gpu tests/backends/test_conformance.py
ON_ANY_DEVICE := tests/property/test_piecewise.py tests/property/test_sequences.py tests/property/test_faults_steps.py

QUICK := tests/behaviour tests/plan tests/vocabulary --front-ends graphed \
	$(addprefix tests/runtime/test_,forms_of_calls.py compiled_by_torch.py decision.py dims.py signature.py argument_metadata.py) \
	tests/engines/test_policies.py tests/engines/test_key_dispatcher.py --ignore-glob='*/test_faults_*' \
	--deselect tests/behaviour/test_python_state.py::test_what_only_a_run_with_padding_writes_is_put_back

# Style, and which package may import which.
lint: $(VENV)/.dev
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev
	@$(BIN)/mypy

# Many real models, tiny and with random weights, each against eager. Models of timm are tried where it is installed, with
# pillow; torchvision is not needed.
sweep: $(VENV)/.native
	@$(BIN)/python -m benchmarks.real_models.sweep --write $(ARGS)

# The property tests on new random examples. A failure prints the line that repeats it, and build/fuzz keeps the example:
# the next run tries it first.
fuzz: $(VENV)/.native
	@$(BIN)/python -m pytest $(PARALLEL) -m hypothesis --hypothesis-profile=fuzz $(ARGS)

# Small faults put into the modules where a silent mistake is a wrong answer: which ones do the tests notice?
mutants: $(VENV)/.test
	@$(BIN)/python -m tests.mutants $(ARGS)

# Ten million calls of twelve programs in turns, with all that happens to a server in days; ARGS="--minutes 15" ends earlier.
soak: $(VENV)/.native
	@$(BIN)/python -m tests.soak.long_run $(ARGS)

# generate() of transformers for all decoder families and modes; takes some minutes.
generate-test: $(VENV)/.native
	@$(BIN)/python -m pytest $(PARALLEL) tests/integrations/broad_generation.py tests/integrations $(ARGS)

# The GPU tests without a GPU, on torch for CUDA over an emulated runtime. Needs g++; makes $(CUDA_VENV) unless GPU_PYTHON
# names a python.
EMULATOR := $(CURDIR)/build/emulator
gpu-emulated: export PYTHONPATH := $(CURDIR)/src:$(CURDIR)/tests/emulator
gpu-emulated:
	@tests/emulator/build.sh $(GPU_PYTHON) $(EMULATOR)
	@LD_PRELOAD=$(EMULATOR)/libcudart.so.13 LD_LIBRARY_PATH=$(EMULATOR) \
		$(GPU_PYTHON) -m pytest -p emulated_cuda $(ON_DEVICE) $(ARGS)
	@LD_PRELOAD=$(EMULATOR)/libcudart.so.13 LD_LIBRARY_PATH=$(EMULATOR) GRAPHDISPATCH_TEST_DEVICE=cuda \
		$(GPU_PYTHON) -m pytest -p emulated_cuda $(ON_ANY_DEVICE) $(ARGS)

# The library on a device whose streams are threads, on torch for the CPU. Needs g++, which compiles it once. A process that
# has used it cannot fork.
ON_QUEUED := $(ON_ANY_DEVICE) tests/behaviour/test_surroundings.py \
	$(addprefix tests/behaviour/test_footguns_,rows.py breaks.py dims.py) \
	$(addprefix tests/proof/check/test_,padding.py row_proof.py) tests/runtime/test_plain_capturer.py \
	--front-ends graphed -k "not pickle and not fork and not groups_of_rows"
device-test: export PYTHONPATH := $(CURDIR)/tests/device
device-test: $(VENV)/.native
	@$(BIN)/python -m pytest -p queued_backend tests/device $(filter tests/backends/%,$(ON_DEVICE)) $(ARGS)
	@GRAPHDISPATCH_TEST_DEVICE=queued GRAPHDISPATCH_TEST_DELAYS=50 \
		$(BIN)/python -m pytest -p queued_backend $(ON_QUEUED) $(ARGS)

# What only a GPU can show, the most important first; GPU_PYTHON=python3 OUT=folder. Takes nine minutes at most. Each part ends
# with its bars, the whole with a table, and it fails where a bar is missed. ARGS="--parts capture tests" chooses.
gpu-all:
	@$(GPU_PYTHON) $(NATIVE)/build.py || true
	@$(GPU_PYTHON) make/gpu_all.py --out $(OUT) $(ARGS)

# What graphs are worth on a GPU, beside their peers.
gpu-bench:
	@$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# The native core under the sanitizers of addresses, undefined behaviour and threads, in copies of the sources, and with
# freed objects as traps; then the test device under the same sanitizers. Needs g++.
SANITIZED := build/sanitized
NATIVE_TESTS := tests/native tests/runtime/test_argument_metadata.py
SANITIZER_LIBRARIES = $(shell for name in $(1) libstdc++; do g++ -print-file-name=$$name.so; done)
native-check: $(VENV)/.test
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src $(SANITIZED)/addresses && cp -r src $(SANITIZED)/threads
	@CXX=g++ $(BIN)/python $(SANITIZED)/addresses/graphdispatch/native/build.py -O1 -g -fno-omit-frame-pointer \
		-fsanitize=address,undefined -fno-sanitize-recover=all
	@CXX=g++ $(BIN)/python $(SANITIZED)/threads/graphdispatch/native/build.py -O1 -g -fsanitize=thread
	@PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED)/addresses LD_PRELOAD="$(call SANITIZER_LIBRARIES,libasan libubsan)" \
		$(BIN)/python -m pytest $(NATIVE_TESTS) $(ARGS)
	@TSAN_OPTIONS="suppressions=$(CURDIR)/tests/native/threads.supp report_mutex_bugs=0" \
		PYTHONPATH=$(SANITIZED)/threads LD_PRELOAD="$(call SANITIZER_LIBRARIES,libtsan)" \
		$(BIN)/python -c "import torch; torch.set_num_threads(1); from tests.soak.test_soak import Soak; Soak(roomy=True).run(16000)"
	@PYTHONPATH=tests/native $(BIN)/python -m pytest -p traps $(NATIVE_TESTS) $(ARGS)
	@PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:handle_segv=0 LD_PRELOAD="$(call SANITIZER_LIBRARIES,libasan libubsan)" \
		QUEUED_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all" PYTHONPATH=tests/device \
		$(BIN)/python -m pytest -p queued_backend tests/device $(ARGS)
	@TSAN_OPTIONS="suppressions=$(CURDIR)/tests/native/threads.supp report_mutex_bugs=0 handle_segv=0" \
		LD_PRELOAD="$(call SANITIZER_LIBRARIES,libtsan)" QUEUED_FLAGS=-fsanitize=thread PYTHONPATH=tests/device \
		$(BIN)/python -m pytest -p queued_backend tests/device $(ARGS)

# Each guard is checked and each call matched by the core and by Python, in all the tests; in one process.
native-twins: $(VENV)/.native
	@PYTHONPATH=tests/native $(BIN)/python -m pytest $(PARALLEL) -p twins tests $(ARGS)

# The rules of rows against the samples of the torch that is installed there, whether they were checked with it or not;
# then programs of other libraries in their newest releases. Remove $(DRIFT_VENV) to have newer ones.
drift: $(DRIFT_VENV)/.test $(NATIVE_SOURCES)
	@$(DRIFT_VENV)/bin/python -m tests.proof.rows.op_samples
	@$(DRIFT_VENV)/bin/python -m pytest tests/real_programs tests/integrations $(ARGS)

# Programs of thirty libraries as they are, with the defaults and prewarmed; ARGS="--only timm" for some, --write for the page.
real: $(REAL_VENV)/.test $(NATIVE_SOURCES)
	@$(REAL_VENV)/bin/python $(NATIVE)/build.py
	@$(REAL_VENV)/bin/python -m benchmarks.real $(ARGS)

# The plug-in's tests: vLLM itself on the CPU, decided by the dispatcher and served by the graphs of this library. An older
# vLLM's dispatcher is compared with, too, where pip can have its wheel.
vllm-test: $(VLLM_VENV)/.test
	@cd $(VLLM_PLUGIN) && $(CURDIR)/$(VLLM_VENV)/bin/python tests/sources.py
	@cd $(VLLM_PLUGIN) && $(CURDIR)/$(VLLM_VENV)/bin/python -m pytest $(ARGS)

# Random models of each family that the plug-in serves, in both dtypes, every mode, and by one and two threads, beside vLLM's
# own eager: some 190 engines, one after the other. Puts the results and their table into the plug-in.
vllm-families: $(VLLM_VENV)/.test
	@cd $(VLLM_PLUGIN) && $(CURDIR)/$(VLLM_VENV)/bin/python tests/families.py --keep $(ARGS)

# The site, shown while you write.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs-serve: $(VENV)/.docs
	@$(BIN)/mkdocs serve $(ARGS)

# The wheel and the sdist, each in an empty environment and used there, and each extra alone. Takes some minutes, most of
# them for torch.
package:
	@$(PYTHON) tests/package/check.py

# Code lines and files of each package, imports inside functions, circles of imports.
count: $(VENV)/.native
	@$(BIN)/python make/count.py $(ARGS)
