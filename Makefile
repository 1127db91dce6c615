# make setup   an environment in .venv with torch, Lightning and this package (built in place)
# make demo    trains a small network on two processes
# make test    C++ tests (plain, ThreadSanitizer, AddressSanitizer), then the Python tests
# make bench   measures against Gloo, DDP and, where installed, MPICH
# make compare one training with a single process, ddp and hvd, side by side
# make wheel   builds dist/*.whl and runs it on every Python that the machine has
# make lint    ruff, mypy, clang-format
# make clean   removes what was built; the environment stays
#
# PYTHON=...      the Python that makes the environment; a torch that it can import is reused
# HVD_PYTHON=...  a Python to use as it is, instead of an environment in .venv
# TORCH=...       what to ask pip for, if torch has to be installed; by default the release that the
#                 figures in the README were measured with

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv

ifdef HVD_PYTHON
PY := $(HVD_PYTHON)
STAMPS := build
TOOLS :=
else
PY := $(VENV)/bin/python
STAMPS := $(VENV)
TOOLS := $(VENV)/.hvd-tools
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
endif
BUILT := $(STAMPS)/.hvd-built

BUILD_REQUIRES = $(shell sed -n \
  '/^requires = / { s/.*\[//; s/\].*//; s/", "/" "/g; p }' pyproject.toml)
CPP_FILES = $(shell find csrc tests/cpp tests/fakes tests/headers -name '*.h' -o -name '*.cpp' -o -name '*.cu')
# Quick ones first. One pytest run, so that its last line speaks for all of them.
TEST_FOLDERS = $(wildcard tests/unit tests/multi tests/launch tests/faults tests/acceptance)
BENCHMARKS := allreduce hooks step memory startup checkpoint compile amp wire

.PHONY: setup demo compare test test-cpp test-python bench wheel lint clean
.DELETE_ON_ERROR:
# Tests and measurements want the machine for themselves.
.NOTPARALLEL:

setup: $(BUILT)

# A torch that $(PYTHON) has, in an environment or in the system, is put on the path of ours.
$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV)
	@folder=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))' \
	  2>/dev/null); \
	if [ -n "$$folder" ]; then \
	  echo "reusing the torch in $$folder"; \
	  echo "$$folder" > $$(echo $(VENV)/lib/python3.*/site-packages)/reused_torch.pth; \
	fi

$(VENV)/.hvd-tools: | $(VENV)/bin/python
	@$(PY) -c 'import torch' 2>/dev/null || { \
	  echo "Installing torch. Where the index gives the large CUDA build, get the CPU build by"; \
	  echo "  make setup TORCH='$(TORCH) --index-url https://download.pytorch.org/whl/cpu'"; \
	  $(PY) -m pip install $(TORCH); \
	}
	$(PY) -m pip install -q $(BUILD_REQUIRES)
# Also where the reused folder has them: it is their programs that are needed, in our bin.
	$(PY) -m pip install -q --ignore-installed cmake ninja clang-format
	@touch $@

# Built without isolation, so that a change compiles only what it concerns.
$(BUILT): pyproject.toml CMakeLists.txt $(shell find csrc -type f) | $(TOOLS)
	$(PY) -m pip install -q --no-build-isolation -e '.[dev]'
	@mkdir -p $(STAMPS) && touch $@

demo: $(BUILT)
	$(PY) examples/digits.py

compare: $(BUILT)
	$(PY) examples/compare.py

test: test-cpp test-python

test-cpp: $(BUILT)
	scripts/cpp_tests.sh plain thread address

test-python: $(BUILT)
	$(PY) -m pytest $(TEST_FOLDERS)

bench: $(BUILT)
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(PY) -m benchmarks.$$name; done

wheel: $(BUILT)
	rm -f dist/hvd_strategy-*.whl
	$(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist .
	$(PY) -m abi3audit --strict --summary dist/hvd_strategy-*.whl
	$(PY) scripts/check_wheel.py dist/hvd_strategy-*.whl

lint: $(BUILT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	clang-format --dry-run -Werror $(CPP_FILES)

clean:
	rm -rf build dist CMakeFiles .cmake CMakeCache.txt CMakeInit.txt cmake_install.cmake build.ninja \
	  .ninja_deps .ninja_log .skbuild-info.json compile_commands.json install_manifest.txt cpp_tests \
	  hvd_strategy/_core*.so hvd_strategy/_core.pyi $(BUILT)
