.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NVME ?= runs

.PHONY: help train test lint types layers unit setup clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[hf,dev]'
	touch $@

setup: $(VENV)/.installed  ## make a virtual environment with everything in it

train: setup  ## train a GPT on real text, its model states 4 times larger than the memory budget (about 3 minutes)
	mkdir -p $(NVME)
	$(BIN)/zinf train --preset demo --nvme $(NVME) --save-plan $(NVME)/plan.json

test: setup lint types layers unit  ## lint, types, layering and all tests (15 to 20 minutes on 2 cores)

lint: setup  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## check types
	$(BIN)/mypy

layers: setup  ## check which module may import which
	$(BIN)/lint-imports

unit: setup  ## run the tests, one process for each core
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadscope --no-loadscope-reorder

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
