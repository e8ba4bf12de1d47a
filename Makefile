# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Each prints what it does and stops, saying what is missing, when it cannot.

# One that runs: pyenv, say, leaves names on the PATH that only print an error.
ifndef PYTHON
PYTHON := $(firstword $(shell for python in python3.11 python3.12 python3.13; do \
  $$python -c '' 2>/dev/null && echo $$python && break; done) python3.11)
endif
CXX ?= g++
RUN ?= $(shell date +%Y%m%d-%H%M%S)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --progress-bar off
TORCH := $(shell sed -n 's/^torch==//p' requirements/cpu.lock)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
IMAGE ?= nwor
WHEEL_CUDA := $(NWOR_CUDA)
# The lock's torch is the CPU build: CUDA kernels would take a minute to build and could not run beside it.
export NWOR_CUDA ?= 0
SOURCES := $(shell find kernels -type f 2>/dev/null)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo reproduce test soak check lab figures docs doctor kernels wheel image shell clean need-python need-cxx need-docker

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14
	@printf '\nPYTHON=%s (which Python makes the environment)\n' '$(PYTHON)'

setup: $(VENV)/.stamp ## make .venv from the exact lock and build the extension

demo: setup ## vanilla vLLM beside mode stage under the cache auditor, on the shipped pair: two minutes, no GPU
	$(BIN)/python -m nwor_lab.demo

reproduce: setup ## run every notebook on the CPU, print the table of claims, leave results/<run>/; RESUME=<run> goes on
	@$(BIN)/nwor reproduce $(if $(RESUME),--resume --run $(RESUME),--run $(RUN))

test: setup $(VENV)/.interpreter ## ruff, mypy, import contracts and the tests that need no GPU
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=$(VENV)/interpreter $(BIN)/python -m pytest -n 2 tests/kernels/test_gpu_attention*.py tests/audit/test_kernels.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder

soak: setup ## 20 minutes of random traffic on real engines, every step audited; MINUTES=, SEED=, MODE=, TP=
	@$(BIN)/nwor soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(MODE),--mode $(MODE)) \
	  $(if $(TP),--tp $(TP))

lab: setup ## open JupyterLab on the lessons
	$(BIN)/jupyter lab --ServerApp.root_dir='$(CURDIR)' $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/00_idea.ipynb

figures: setup ## draw the paper's figures from data/recorded, or from SOURCE=results/<run>
	$(BIN)/nwor figures $(if $(SOURCE),--source $(SOURCE))

docs: setup ## write README.md and the pages of docs/ that state numbers, from data/recorded
	$(BIN)/python -m docs.generate

doctor: setup ## print the environment, the operators and the modes that can run here
	$(BIN)/nwor doctor

kernels: $(VENV)/.packages need-cxx ## rebuild the extension alone
	$(BIN)/python setup.py build_ext --inplace

wheel: $(VENV)/.packages need-cxx ## build dist/*.whl, with CUDA where nvcc is found (NWOR_CUDA=0 leaves it out)
	@rm -rf build/lib.* build/bdist.*
	NWOR_CUDA='$(WHEEL_CUDA)' $(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

image: need-docker ## build the GPU container
	docker build -t $(IMAGE) --build-arg UID=$(shell id -u | sed 's/^0$$/1000/') .

shell: need-docker ## open a shell in the GPU container, on this checkout
	@docker image inspect $(IMAGE) >/dev/null 2>&1 || { echo 'no image "$(IMAGE)": run `make image` first' >&2; exit 1; }
	@echo 'this checkout is mounted over the image'"'"'s own: build its extension with `python setup.py build_ext --inplace`'
	docker run --rm -it --gpus all --ipc=host -v "$(CURDIR)":/home/nwor/nwor $(IMAGE) bash

clean: ## remove the environment and everything built; results stay
	rm -rf $(VENV) build dist *.egg-info nwor/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find nwor nwor_lab tests -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment -----------------------------------------------------------------------------------------------

need-python:
	@'$(PYTHON)' -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo 'PYTHON=$(PYTHON) is no Python 3.11, 3.12 or 3.13, which the lock is for.' >&2; \
	  echo 'Install one (with venv and headers), or name it: make PYTHON=/path/to/python3.12' >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) has no venv module: install it (Debian: apt install $(notdir $(PYTHON))-venv).' >&2; exit 1; }
	@'$(PYTHON)' -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || { \
	  echo '$(PYTHON) has no headers: install them (Debian: apt install $(notdir $(PYTHON))-dev).' >&2; exit 1; }

need-cxx:
	@command -v '$(CXX)' >/dev/null || { \
	  echo 'no C++ compiler ($(CXX)): install g++ 10 or newer (Debian: apt install g++), or set CXX.' >&2; exit 1; }
	@echo 'int main() {}' | '$(CXX)' -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || { \
	  echo '$(CXX) does not know -std=c++20: install g++ 10 or newer, or set CXX.' >&2; exit 1; }

need-docker:
	@command -v docker >/dev/null || { echo 'no docker: install it, or use environment.yml with conda.' >&2; exit 1; }

# PyPI's torch is a CUDA build on some platforms, which cannot be imported without its libraries (3 GB more). Its Triton
# goes again: vLLM's CPU build warns where it finds one.
define TORCH_OF_PYPI
{ echo '      no CPU build of torch at either: PyPI'"'"'s, with all that it needs' >&2; \
  $(subst --no-deps,,$(INSTALL)) 'torch==$(firstword $(subst +, ,$(TORCH)))' && $(BIN)/python -m pip uninstall -qqy triton; }
endef

# Order-only: the needs are looked at every time, but do not make the environment old.
$(VENV)/.packages: requirements/cpu.lock | need-python
	@echo '[1/4] $(VENV) by $(PYTHON)'
	@rm -rf $(VENV)
	@'$(PYTHON)' -m venv $(VENV)
	@echo '[2/4] torch $(TORCH), from the index at hand or from PyTorch'"'"'s own'
	@$(INSTALL) 'torch==$(TORCH)' 2>/dev/null \
	  || $(INSTALL) --extra-index-url $(TORCH_INDEX) 'torch==$(TORCH)' \
	  || $(TORCH_OF_PYPI)
	@echo '[3/4] the $(shell grep -c == requirements/cpu.lock) packages of requirements/cpu.lock (a minute or two; 3 GB)'
	@grep -v '^torch==' requirements/cpu.lock > $(VENV)/lock-without-torch
	@$(INSTALL) -r $(VENV)/lock-without-torch
	@$(BIN)/python -c 'import torch'
	@touch $@

# Only the tests need it, and vLLM must not see it: see the lock.
$(VENV)/.interpreter: requirements/interpreter.lock $(VENV)/.packages
	@echo 'Triton'"'"'s interpreter, of requirements/interpreter.lock (0.7 GB)'
	@rm -rf $(VENV)/interpreter
	@$(INSTALL) --target $(VENV)/interpreter -r $<
	@touch $@

$(VENV)/.stamp: $(VENV)/.packages pyproject.toml setup.py $(SOURCES) | need-cxx
	@echo '[4/4] nwor and its extension'
	@$(INSTALL) --no-build-isolation -e ./kv_audit
	@$(INSTALL) -vvv --no-build-isolation -e . > $(VENV)/build.log 2>&1 \
	  || { tail -n 40 $(VENV)/build.log >&2; echo 'the build failed; its whole log: $(VENV)/build.log' >&2; exit 1; }
	@sed -n 's/ *-> .*//; s/^.*\(\*\*\* nwor.*\)/      \1/p' $(VENV)/build.log
	@touch $@
