# `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help up test test-quick check mutants simulation faults openapi client lock clean
.DELETE_ON_ERROR:
# Print the output of commands, but not the commands.
.SILENT:

BIN := .venv/bin
# For `make test ARGS='-k join -x'`.
ARGS ?=
# The interpreter of a new .venv; empty: the first suitable one in PATH.
PYTHON ?=
export PYTHON
# The tests start hundreds of processes, which reuse compiled modules: write them even if the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: .venv/.run ## start the control plane with this machine as its node, on http://127.0.0.1:8700
	exec $(BIN)/mooring up

test: .venv/.dev ## run all tests (installs the test bed's parts first); ARGS='-k join -x' for pytest, ARGS=--every-database
	tests/testbed/install.sh
	$(BIN)/pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder $(ARGS)

test-quick: .venv/.dev ## run the tests that need no daemon (dockerd, PostgreSQL, Node.js), on SQLite; ARGS as for test
	$(BIN)/pytest --quick --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder $(ARGS)

check: .venv/.dev ## check style, types, imports, and the rules of source and language
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/test_architecture.py tests/test_language.py tests/contract/test_document.py tests/mutants

mutants: .venv/.dev ## remove each guard of tests/mutants in a copy, and expect its test to fail; ARGS='--sample 30'
	tests/testbed/install.sh
	$(BIN)/python -m tests.mutants $(ARGS)

simulation: .venv/.dev ## simulate the product with faults, 1,000 seeds; ARGS='--seeds 17 --trace' for one
	$(BIN)/python -m tests.simulation $(ARGS)

faults: .venv/.dev ## try faults on three replicas and three nodes for 15 minutes (docs/faults.md); ARGS='--only F2,F8'
	tests/testbed/install.sh
	$(BIN)/python -m tests.faults $(ARGS)

openapi: .venv/.dev ## regenerate docs/openapi.json after an intended change of the API
	$(BIN)/python -m tests.contract.document

client: .venv/.dev ## regenerate what is made from the asynchronous client
	$(BIN)/python scripts/generate_sync.py
	$(BIN)/python scripts/generate_operations.py

lock: ## regenerate requirements*.txt after a change of pyproject.toml
	scripts/lock.sh

clean: ## remove generated files and .venv, but not your data in .mooring
	rm -rf .venv build dist .mypy_cache .ruff_cache .import_linter_cache .hypothesis .testbed
	rm -rf tests/contract/.venv tests/contract/node_modules tests/sso/node_modules tests/jupyter/.venv tests/ansible/.venv \
		tests/skypilot/.venv
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Marker files, so that .venv is updated only when a pin changes.
.venv/.run: requirements.txt requirements-build.txt pyproject.toml client/pyproject.toml
	scripts/venv.sh run

.venv/.dev: requirements-dev.txt pyproject.toml client/pyproject.toml
	scripts/venv.sh dev
