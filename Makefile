# The first run makes .venv and installs everything into it; later runs rebuild only what changed. CONTRIBUTING.md explains the common targets.

PYTHON ?= python3
VENV ?= .venv

# pip prefers a local version such as 2.13.0+cpu if one of its indexes or wheel folders has it; a plain `torch` on Linux brings gigabytes of
# CUDA packages. A suitable torch in $(VENV) is kept.
CPU_TORCH := 2.13.0
ifeq ($(shell uname -s),Darwin)
TORCH ?= torch
else
TORCH ?= torch==$(CPU_TORCH)
endif
# At most 8 processes, because of memory and a shared GPU. Work stealing keeps most files in one process, which compiles and loads once.
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist worksteal

BIN := $(VENV)/bin
CPP_SOURCES := $(shell find bench/agx csrc shaders tests -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.metal')
SHIM_SOURCES := $(shell find torch_metal_attn/simulator/shim bench/gpu_headers -type f)
HAS_TORCH := import torch; exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))

.DELETE_ON_ERROR:
.PHONY: demo test mutants test-simulator check fuzz build lint lint-format lint-shaders lint-types format bench census wheel wheel-macos wheel-check readme-check docs hf-kernel clean

demo: build
	$(BIN)/python -m torch_metal_attn demo

# torch has one thread per worker, because the workers use every core. Bytecode is always written, for the processes that tests start.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_ARGS)

test: lint
	$(TEST) -m "not mutant"

# Faults planted in kernels test the tests.
mutants: build
	$(TEST) -m mutant

# The simulator's own tests, with another compiler: `make test-simulator CLANG=clang++-22`, or CLANG=ziglang.
test-simulator: build
	$(if $(CLANG),TORCH_METAL_ATTN_CLANG=$(CLANG)) $(TEST) tests/simulator

# For daily work: the first case of each test function.
check: lint
	$(TEST) -m "not mutant" --first-cases

# Random calls until the time is over: `make fuzz MINUTES=60 WORKERS=4 SEED=7`. The default is another seed each time.
MINUTES ?= 5
WORKERS ?= 1
fuzz: build
	OMP_NUM_THREADS=1 $(BIN)/python -m torch_metal_attn fuzz --minutes $(MINUTES) --workers $(WORKERS) $(if $(SEED),--seed $(SEED))

build: $(VENV)/.installed

lint: build
	@$(MAKE) --no-print-directory -j 2 lint-format lint-shaders lint-types
	@$(BIN)/python .ci/budget.py

lint-format:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@echo "clang-format --dry-run"
	@$(BIN)/clang-format --dry-run -Werror --ferror-limit=20 $(CPP_SOURCES) $(SHIM_SOURCES)

lint-shaders:
	$(BIN)/python -m torch_metal_attn.tools.lint shaders

lint-types:
	$(BIN)/mypy

format: build
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP_SOURCES) $(SHIM_SOURCES)

bench: build
	@for script in bench/bench_*.py; do \
	  echo "== $$script"; $(BIN)/python -m "bench.$$(basename $$script .py)" || exit 1; \
	done

# Compare every class of transformers' auto mappings with its eager attention: about 30 minutes on one core. An interrupted run continues
# from build/census.jsonl.
census: build
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.transformers.census --keep build/census.jsonl \
	  --results bench/results/census.md

# Wheels in dist/, checked: for this machine, and on Linux for Macs.
wheel: build
	$(BIN)/python .ci/build_wheel.py

wheel-macos: build
	$(BIN)/python .ci/build_wheel.py --macos

# A fresh environment for each torch: `make wheel wheel-check TORCHES="2.10.0 2.15.0"`. On Linux a torch without a local version such as
# +cpu brings up to 7 GB of CUDA packages.
TORCHES ?= $(CPU_TORCH)
wheel-check: build
	$(BIN)/python .ci/clean_venvs.py $(TORCHES)

# Run the README's commands and examples in a clone of the commit and a fresh environment.
readme-check: build
	$(BIN)/python .ci/clean_venvs.py --readme

# The pages as a site, with the API and a search. A dead link or heading is an error.
docs: build
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "built; to read it: python -m http.server --directory build/site"

# dist/hf-kernel/ for Hugging Face's `kernels`: LOCAL_KERNELS=<user>/<name>=dist/hf-kernel
hf-kernel: wheel-macos
	$(BIN)/python .ci/hf_kernel.py dist/torch_metal_attn-*-macosx_14_0_arm64.whl

clean:
	rm -rf $(VENV) build dist *.egg-info torch_metal_attn/_shaders torch_metal_attn/*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) must be Python 3.10 or later (make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "== Making $(VENV)"
	$(PYTHON) -m venv $(VENV)

# The build runs in $(VENV) without pip's isolation, with its torch and tools. torch looks for ninja in PATH, and without it compiles one file
# at a time.
$(VENV)/.tools: | $(VENV)/bin/python
	@echo "== Installing torch and the build's tools"
	$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || $(BIN)/pip install '$(TORCH)'
	$(BIN)/pip install 'setuptools>=77' wheel ninja
	touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(wildcard setup.py) \
		$(shell find csrc shaders -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.metal')
	@echo "== Building and installing torch_metal_attn"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --no-build-isolation --editable '.[dev,demo]'
	@$(BIN)/python .ci/repository.py
	touch $@
