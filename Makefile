# One word per task; `make help` lists them. Needs git, make, Python >= 3.11 with its headers and a
# C++ compiler: CMake, ninja and everything else come from PyPI into .venv, at the versions that
# constraints.txt pins; on a machine with an NVIDIA GPU and no CUDA toolkit, nvcc does too.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PORT ?= 8765
MODEL ?= smollm2-135m-instruct
SERVE_ARGS ?=
PYTEST_ARGS ?=
SOAK_SECONDS ?= 1800
BENCH ?= all
BENCH_ARGS ?=
VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v "$$p" && break; \
	done)

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
CSRC := $(shell find csrc -type f)
CXX_FILES := $(filter %.cpp %.h %.cu %.cuh,$(CSRC))

# The build has CUDA kernels where there is a GPU, or where TINYVLLM_CUDA=ON asks for them (AUTO: where
# there is an nvcc, csrc/find_nvcc.cmake). If no nvcc would do, PyPI's is installed first.
ifeq ($(origin HAS_GPU),undefined)
HAS_GPU := $(shell { test -e /dev/nvidiactl || test -e /proc/driver/nvidia/version || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)
endif
HAS_NVCC := $(shell PATH="$$PATH:$$CUDA_PATH/bin:$$CUDA_HOME/bin:/usr/local/cuda/bin" "$${CUDACXX:-nvcc}" --version 2>/dev/null | \
	grep -Eq 'release (1[2-9]|[2-9][0-9])\.' && echo yes)
NVCC_DEPS := $(if $(HAS_NVCC),,$(VENV)/.deps-cuda)
WANTS_CUDA := $(if $(filter OFF,$(TINYVLLM_CUDA)),,$(HAS_GPU)$(filter ON,$(TINYVLLM_CUDA)))

# $(call requirements,EXTRA ...): what pyproject.toml asks for, one requirement a line. "build" is
# what building asks for, with the CMake and ninja that scikit-build-core would fetch by itself.
requirements = $(PY) -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	extras = p["project"]["optional-dependencies"] | {"core": p["project"]["dependencies"], \
	"build": [*p["build-system"]["requires"], "cmake>=3.28", "ninja"]}; \
	print("\n".join(line for name in sys.argv[1:] for line in extras[name]))' $(1)
install = $(call requirements,$(1)) > $(VENV)/requirements.txt && \
	echo "installing into $(VENV): $(1) (a few minutes the first time)" && \
	$(PIP) install -q -c constraints.txt -r $(VENV)/requirements.txt

# The generations of this machine's GPUs, as CMake names them: nothing when one is not of the list
# that the kernels are built for by default.
gpu_archs = for cap in $$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u); do \
	case $$cap in 9.0) archs+=";90a-real";; 8.0|8.6|8.9|10.0|12.0) archs+=";$${cap/./}-real";; \
	*) archs=; break;; esac; done

.PHONY: help serve test test-cuda cuda-check soak lint format bench build clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.built ## install, fetch the model, serve the chat page (PORT=8765, MODEL=alias|directory)
	@exec $(PY) -m tinyvllm.gateway --port $(PORT) --model $(MODEL) $(SERVE_ARGS)

test: $(VENV)/.built $(VENV)/.deps-test ## install, run every test (PYTEST_ARGS="-k name")
	@$(PY) -m pytest $(PYTEST_ARGS)

test-cuda: ## the tests that need a GPU, with the python that has torch (PY=python3 uses no venv)
	@$(PY) -c 'import torch; torch.cuda.is_available() or exit("no CUDA device here: nothing was tested")'
	@$(PY) -m pytest -m cuda $(PYTEST_ARGS)

cuda-check: $(VENV)/.deps $(NVCC_DEPS) ## compile every CUDA kernel for every generation of GPU: runs nothing
	@env -u CUDAARCHS PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S csrc -B build/cuda-check -G Ninja --log-level=WARNING \
		-DTINYVLLM_CUDA=ON -DPython_EXECUTABLE="$(abspath $(PY))" -Dpybind11_DIR="$$($(PY) -m pybind11 --cmakedir)"
	@cd build/cuda-check && ninja=$(abspath $(VENV))/bin/ninja && $$ninja $$($$ninja -t targets all | sed -n 's/\(\.cu\.o\):.*/\1/p')

soak: $(VENV)/.built $(VENV)/.deps-test ## an engine under load: memory and latency stay flat (SOAK_SECONDS=1800)
	@SOAK_SECONDS=$(SOAK_SECONDS) $(PY) -m pytest tests/engine/test_soak.py --timeout 0 $(PYTEST_ARGS)

lint: $(VENV)/.deps-lint ## ruff, ruff format, mypy --strict, clang-format: changes nothing
	@failed=; run() { echo "$$1 $$2 $$3 $$4"; "$$@" || failed=yes; }; \
	run $(PY) -m ruff check .; \
	run $(PY) -m ruff format --check .; \
	run $(PY) -m mypy; \
	run $(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES); \
	test -z "$$failed"

format: $(VENV)/.deps-lint ## apply ruff's fixes, ruff format and clang-format
	$(PY) -m ruff check --fix --exit-zero .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

bench: $(VENV)/.built $(VENV)/.deps-bench ## every engine that is installed, side by side (BENCH=latency BENCH_ARGS="--rounds 5")
	@$(PY) -m tinyvllm.bench $(BENCH) --model $(MODEL) $(BENCH_ARGS)

build: $(VENV)/.built ## the venv with tinyvllm in it (editable)

clean: ## remove .venv, build output and caches; the model cache stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tinyvllm gateway tests examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f tinyvllm/*.so

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "tinyvllm needs Python 3.11 or newer, and none was found: set PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: on Debian, apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.deps: pyproject.toml constraints.txt $(VENV)/.python
	@$(call install,core gateway build)
	@touch $@

$(VENV)/.deps-%: $(VENV)/.deps
	@$(call install,$*)
	@touch $@

# The build uses .venv's own pinned tools (no isolated environment), so that a rebuild is
# incremental and downloads nothing.
$(VENV)/.built: $(VENV)/.deps $(if $(WANTS_CUDA),$(NVCC_DEPS)) $(CSRC) tinyvllm/version.py
	@command -v "$${CXX:-c++}" >/dev/null || { echo "tinyvllm needs a C++20 compiler, and '$${CXX:-c++}' was not found: on Debian, apt-get install g++" >&2; exit 1; }
	@$(PY) -c 'import os, sysconfig; os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) or exit("Python.h was not found: on Debian, apt-get install python3-dev")'
	@echo "building tinyvllm (C++$(if $(WANTS_CUDA), and CUDA): one to three minutes)"
	@$(if $(WANTS_CUDA)$(TINYVLLM_CUDA),,export TINYVLLM_CUDA=OFF;) archs=; $(if $(WANTS_CUDA),$(gpu_archs);) test -n "$$CUDAARCHS" -o -z "$$archs" || export CUDAARCHS="$${archs#;}"; \
		$(PIP) install -q --no-build-isolation --no-deps -e .
	@$(if $(and $(HAS_GPU),$(WANTS_CUDA)),$(PY) -c 'import torch; torch.version.cuda or print(f"torch {torch.__version__} is a CPU build: the GPU of this machine \
	stays unused. README.md, Installing, says how to get another")')
	@touch $@
