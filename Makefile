# Berth: everything a checkout needs, from a bare machine with Python 3.11. `make help` lists it.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TEST_PROCESSES ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup check format test demo up down status bench mutants schemas clean

help: ## list these targets
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Berth needs Python 3.11; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV) (once; about a minute)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,agent,dev]'
	@touch $@

check: $(STAMP) ## format, lint, types, import rules
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make format'"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy libs/berth services tests bench examples
	@$(BIN)/lint-imports

format: $(STAMP) ## rewrite the code in house style
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

test: $(STAMP) ## all tests, with real NATS and PostgreSQL; no root, Docker or GPU
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup

demo: $(STAMP) ## bring the platform up, run the main job on real programs, show what happened, stop
	@$(BIN)/berth demo

up: $(STAMP) ## start the embedded platform (NATS, PostgreSQL, all services, a simulated fleet)
	@$(BIN)/berth up

down: $(STAMP) ## stop it
	@$(BIN)/berth down

status: $(STAMP) ## say what runs
	@$(BIN)/berth status

bench: $(STAMP) ## print the figures of bench/RESULTS.md, one JSON line each
	@$(BIN)/python -m bench

mutants: $(STAMP) ## break each rule on purpose and see that a test notices (long)
	@$(BIN)/python -m tests.mutants

schemas: $(STAMP) ## write the JSON Schemas of all messages and of the policy document anew
	@$(BIN)/python -m tests.contract.freeze

clean: ## remove .venv, caches and the embedded platform's data (stop it first)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info libs/*.egg-info
