# make serve    set up what is missing, then serve the default model at http://127.0.0.1:8000
# make test     set up with the test packages, then run everything
# make setup    only the set-up: .venv, packages, native code; the command is .venv/bin/aserve
# make lint     ruff and mypy
# make cuda     the CUDA kernels, each held to its limits; needs nvcc, no GPU
# make readme   write the generated parts of README.md
# make clean    remove .venv and everything built
#
# Variables: PYTHON=python3.12   MODEL=/path/to/model   ARGS="--port 9000"   TORCH=torch==2.13.0

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where the CPU build of torch is, for machines whose package index only has the CUDA one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
MODEL ?=
ARGS ?=

BIN := .venv/bin
# Bars when a person looks on; only errors otherwise.
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(if $(MAKE_TERMOUT),,-qq)
SAY := @printf 'make: %s\n'
NATIVE_SOURCES := setup.py $(shell find csrc -path csrc/cuda -prune -o -type f -print 2>/dev/null)
TYPED := $(wildcard aserve/errors.py aserve/core aserve/wire aserve/planes aserve/actors aserve/api)

export PIP_ROOT_USER_ACTION := ignore
MAKEFLAGS += --no-print-directory

.PHONY: help setup setup-test serve test lint cuda readme clean
.DELETE_ON_ERROR:

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

setup: .venv/stamp-native

setup-test: .venv/stamp-native .venv/stamp-test

serve: setup
	@exec $(BIN)/aserve serve $(MODEL) $(ARGS)

test: setup-test
	$(BIN)/python -m pytest $(ARGS)

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/mypy $(TYPED)

cuda: setup .venv/stamp-cuda
	$(BIN)/python -m csrc.cuda.build --check

readme: setup
	$(BIN)/python -m tests.readme

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find aserve \( -name '__pycache__' -o -name '*.so' \) -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) .ci/prerequisites.py
	$(SAY) 'creating .venv'
	@$(PYTHON) -m venv .venv

# torch comes first and exactly: anything looser may bring gigabytes of CUDA libraries. If the
# index at hand has no CPU build of this version, the second line takes it from where it lives.
.venv/stamp-torch: | .venv/bin/python
	$(SAY) 'installing $(TORCH), the CPU build (about 200 MB)'
	@$(PIP) '$(TORCH)+cpu' 2>/dev/null || $(PIP) --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	@touch $@

# The packages aserve needs, without aserve itself, so that editing csrc reinstalls none of them.
.venv/stamp-packages: pyproject.toml .ci/requirements.py .venv/stamp-torch
	$(SAY) 'installing what aserve needs'
	@$(BIN)/python .ci/requirements.py > .venv/requirements.txt
	@$(PIP) -r .venv/requirements.txt '$(TORCH)'
	@touch $@

.venv/stamp-native: .venv/stamp-packages $(NATIVE_SOURCES)
	$(SAY) 'building the native code'
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

.venv/stamp-test: pyproject.toml .ci/requirements.py .venv/stamp-packages
	$(SAY) 'installing the test packages'
	@$(BIN)/python .ci/requirements.py test > .venv/requirements-test.txt
	@$(PIP) -r .venv/requirements-test.txt '$(TORCH)'
	@touch $@

# Without what these packages depend on: CUTLASS is used for its headers alone.
.venv/stamp-cuda: pyproject.toml .ci/requirements.py .venv/stamp-packages
	$(SAY) 'installing the CUDA headers and tools'
	@$(BIN)/python .ci/requirements.py cuda > .venv/requirements-cuda.txt
	@$(PIP) --no-deps -r .venv/requirements-cuda.txt
	@touch $@
