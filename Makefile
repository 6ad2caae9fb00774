# `make` alone says what there is.
.DEFAULT_GOAL := help
.PHONY: help up test test-quick check mutants openapi lock clean
.DELETE_ON_ERROR:
# What a recipe runs is loud enough by itself.
.SILENT:

BIN := .venv/bin
# For `make test ARGS='-k join -x'`.
ARGS ?=
# The interpreter of a new .venv; empty: the first fit one in PATH.
PYTHON ?=
export PYTHON
# The tests start hundreds of processes: compiled modules are reused, also where the environment disables it.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: .venv/.run ## the control plane with this machine as its node, on http://127.0.0.1:8700
	exec $(BIN)/mooring up

test: .venv/.dev ## all tests (installs the test bed's parts first); ARGS='-k join -x' for pytest, ARGS=--every-database
	tests/testbed/install.sh
	$(BIN)/pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder $(ARGS)

test-quick: .venv/.dev ## the tests that need no daemon (dockerd, PostgreSQL, Node.js), on SQLite; ARGS as for test
	$(BIN)/pytest --quick --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder $(ARGS)

check: .venv/.dev ## style, types, imports, and rules of the source and its language
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/test_architecture.py tests/test_language.py

mutants: .venv/.dev ## removes each guard of tests/mutants in a copy, and expects its test to fail; ARGS='--sample 30'
	tests/testbed/install.sh
	$(BIN)/python -m tests.mutants $(ARGS)

openapi: .venv/.dev ## docs/openapi.json anew, after a change of the API on purpose
	$(BIN)/python -m tests.contract.document

lock: ## pin requirements*.txt anew, after a change of pyproject.toml
	scripts/lock.sh

clean: ## remove what was made here, .venv too; never .mooring, which is your data
	rm -rf .venv build dist .mypy_cache .ruff_cache .import_linter_cache .hypothesis .testbed
	rm -rf tests/contract/.venv tests/contract/node_modules tests/sso/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Files of their own, so that they are made again when a pin changes and at no other time.
.venv/.run: requirements.txt requirements-build.txt pyproject.toml
	scripts/venv.sh run

.venv/.dev: requirements-dev.txt pyproject.toml
	scripts/venv.sh dev
