# `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK ?= requirements.lock
MINUTES ?= 10

.DEFAULT_GOAL := help
.PHONY: help run test test-slow lint docs pages tutorial campaign lock audit-deps outside clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(STAMP) ## Audit the embedded network (audit.html) and train with seven methods on small digits.
	$(BIN)/lipbound audit demo --html audit.html
	$(BIN)/lipbound train --arm all --arm certified --preset digits --out runs/digits --resume

test: $(STAMP) ## Run the tests of every promise (9 minutes on 2 cores).
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow"

test-slow: $(STAMP) ## Run the rest: kills, several processes, other libraries, more kernels.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m slow

lint: $(STAMP) ## Check style, types and the direction of imports.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## Build the documentation into site/; any warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pages: $(STAMP) ## Write the pages of results and trust, with their figures, from the committed records.
	$(BIN)/python -m tools.pages

tutorial: $(STAMP) ## Run every command of the tutorial, and write its outputs and pictures anew.
	$(BIN)/python -m tools.tutorial

campaign: $(STAMP) ## Look for violations of the promises for MINUTES (default 10).
	$(BIN)/python -m verify campaign --minutes $(MINUTES)

lock: ## Write requirements.lock anew.
	$(PYTHON) tools/lock.py requirements.lock

audit-deps: $(STAMP) ## Ask the advisory database about every locked package.
	$(BIN)/python tools/audit_deps.py requirements.lock

outside: ## Build the wheel, install it elsewhere and run the examples.
	$(PYTHON) tools/outside.py --out benchmarks/records/outside.json

clean: ## Remove the environment and the built site.
	rm -rf $(VENV) site

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c $(LOCK) -e ".[dev]"
	touch $@
