.DEFAULT_GOAL := help
SHELL := /bin/bash
# The tests start Python a hundred times: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NVME ?= runs
# The GPU that the tests make: 1 has memory of its own, `integrated` lies in the host's RAM.
ZINF_STREAMS ?= 1
# The seed of the delays of `make test-delays`.
ZINF_DELAYS ?= 1

# Two processes more than there are cores: they wait at times, for disks, timers and processes they have started.
# The tests of a module share captured models and plain runs, and stay in one process.
WORKERS := $(shell echo $$(($(shell nproc) + 2)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadscope --no-loadscope-reorder

# mypy takes one core for a minute where it has no cache: it runs beside the tests, and says what it found behind them.
define with_types
$(BIN)/mypy >$(VENV)/types.txt 2>&1 & types=$$!; trap "kill $$types 2>/dev/null" EXIT; \
$(1); tests=$$?; wait $$types; types=$$?; echo "mypy:"; cat $(VENV)/types.txt; exit $$((tests || types))
endef
CORE := tests/zinf_compile/ir tests/passes/analysis tests/passes/transforms tests/passes/planner/memory \
	tests/passes/planner/placement tests/passes/planner/schedule tests/runtime/params tests/runtime/storage \
	tests/parity/test_models.py

.PHONY: help train check test test-long test-all test-streams test-delays test-libraries lint types layers core unit unit-long unit-all setup clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

# Byte code is made on all cores, where pip uses one. The packages named are left to their first import: few of their thousands
# of modules are used. Modules in the syntax of Python 3.12 would be reported as errors by 3.11.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[hf,dev]'
	-$(BIN)/python -m compileall -q -j 0 -x '/(mypy|narwhals|pip|plotly|pygments|scipy|setuptools|tests|transformers)/|/py312_' $(VENV)/lib
	touch $@

setup: $(VENV)/.installed  ## make a virtual environment with everything in it

train: setup  ## train a GPT on real text, its model states 4 times larger than the memory budget (3 to 8 minutes)
	mkdir -p $(NVME)
	$(BIN)/zinf train --preset demo --nvme $(NVME) --save-plan $(NVME)/plan.json

check: lint layers  ## lint, types, layering and a core of the tests
	@$(call with_types,$(PYTEST) -m "not long and not libraries" $(CORE))

test: lint layers  ## lint, types, layering and the tests, all but the long ones
	@$(call with_types,$(PYTEST) -m "not long and not libraries")

test-long: unit-long  ## what `make test` leaves out: more models, placements and examples

test-all: unit-all  ## the same, with every combination of their parameters (an hour)

test-libraries: setup  ## the libraries people train with, and tests of their own: transformers, peft, accelerate
	$(PYTEST) --dist worksteal -m libraries tests/libraries

lint: setup  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## check types
	$(BIN)/mypy

layers: setup  ## check which module may import which
	$(BIN)/lint-imports

core: setup  ## run a core of the tests: records, passes, planner, store, parity
	$(PYTEST) -m "not long and not libraries" $(CORE)

unit: setup  ## run the tests that are not long, in two processes more than there are cores
	$(PYTEST) -m "not long and not libraries"

unit-long: setup
	ZINF_SHARE=most ZINF_VARIANTS=few $(PYTEST) -m "long or hypothesis" --hypothesis-profile long

test-streams: setup  ## the tests of parity on a GPU that the tests make on a CPU, with streams
	ZINF_STREAMS=$(ZINF_STREAMS) $(PYTEST) -m "not long and not libraries" tests/parity

test-delays: setup  ## the tests of parity with some reads, writes and copies late, at random
	ZINF_DELAYS=$(ZINF_DELAYS) $(PYTEST) -m "not long and not libraries" tests/parity tests/runtime/execute

unit-all: setup
	ZINF_SHARE=most $(PYTEST) -m "long or hypothesis" --hypothesis-profile long

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
