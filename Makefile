# Two commands: `make run` (set up, audit the embedded network, train every arm on digits) and `make test` (set up, all tests).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINUTES ?= 10

.PHONY: run test lint picture results campaign trust lock audit-deps outside clean

run: $(STAMP)
	$(BIN)/lipbound audit demo --html audit.html
	$(BIN)/lipbound train --arm all --preset digits --out runs/digits --resume

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

picture: $(STAMP)
	$(BIN)/python docs/picture.py

results: $(STAMP)
	$(BIN)/python docs/results.py

campaign: $(STAMP)
	$(BIN)/python -m lipbound.experiments.campaign --minutes $(MINUTES)

trust: $(STAMP)
	$(BIN)/python docs/trust.py

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c requirements.lock -e ".[dev]"
	touch $@

lock:
	$(PYTHON) tools/lock.py requirements.lock

audit-deps: $(STAMP)
	$(BIN)/python tools/audit_deps.py requirements.lock

outside:
	$(PYTHON) tools/outside.py --out benchmarks/records/outside.json

clean:
	rm -rf $(VENV)
