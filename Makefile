# One word per task; `make help` lists them. Needs git, make, Python >= 3.11 with its headers and a
# C++ compiler: CMake, ninja and everything else come from PyPI into .venv, at the versions that
# constraints.txt pins.

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

# $(call requirements,EXTRA ...): what pyproject.toml asks for, one requirement a line. "build" is
# what building asks for, with the CMake and ninja that scikit-build-core would fetch by itself.
requirements = $(PY) -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	extras = p["project"]["optional-dependencies"] | {"core": p["project"]["dependencies"], \
	"build": [*p["build-system"]["requires"], "cmake>=3.28", "ninja"]}; \
	print("\n".join(line for name in sys.argv[1:] for line in extras[name]))' $(1)
install = $(call requirements,$(1)) > $(VENV)/requirements.txt && \
	echo "installing into $(VENV): $(1) (a few minutes the first time)" && \
	$(PIP) install -q -c constraints.txt -r $(VENV)/requirements.txt

.PHONY: help serve test test-cuda soak lint format bench build clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.built ## install, fetch the model, serve the chat page (PORT=8765, MODEL=alias|directory)
	@exec $(PY) -m tinyvllm.gateway --port $(PORT) --model $(MODEL) $(SERVE_ARGS)

test: $(VENV)/.built $(VENV)/.deps-test ## install, run every test (PYTEST_ARGS="-k name")
	@$(PY) -m pytest $(PYTEST_ARGS)

test-cuda: ## the tests that need a GPU, with the python that has torch (PY=python3 uses no venv)
	@$(PY) -c 'import torch; torch.cuda.is_available() or exit("no CUDA device here: nothing was tested")'
	@$(PY) -m pytest -m cuda $(PYTEST_ARGS)

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
	@$(call install,core build)
	@touch $@

$(VENV)/.deps-%: $(VENV)/.deps
	@$(call install,$*)
	@touch $@

# The build uses .venv's own pinned tools (no isolated environment), so that a rebuild is
# incremental and downloads nothing.
$(VENV)/.built: $(VENV)/.deps $(CSRC) tinyvllm/version.py
	@command -v "$${CXX:-c++}" >/dev/null || { echo "tinyvllm needs a C++20 compiler, and '$${CXX:-c++}' was not found: on Debian, apt-get install g++" >&2; exit 1; }
	@$(PY) -c 'import os, sysconfig; os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) or exit("Python.h was not found: on Debian, apt-get install python3-dev")'
	@echo "building tinyvllm (C++: one to three minutes)"
	@$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@
