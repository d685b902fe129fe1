# `make run` starts a gateway with a demo; `make test` checks it. Both set up what they need first.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow quick boxless thorough bench hosts lint clean

# Tests run in this many processes: one more than two cores, because some of them wait.
JOBS ?= 3
PYTHON := .venv/bin/python
# Tests start hundreds of processes that load the same modules: what one compiles is kept for the others.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make setup   a virtual environment in .venv with everything that Ringfence needs"
	@echo "make run     start a gateway with demo contracts"
	@echo "make test    lint, types, layers, and the tests, a quarter of an hour (installs test tools into .tools)"
	@echo "make test-slow  the tests that are slow by nature: suites and servers of others, long loops, tutorials"
	@echo "make quick   lint, types, layers, and the tests that need no box, server or browser"
	@echo "make boxless  what of all that can be tried on a machine that makes no boxes"
	@echo "make thorough  the tests with generated examples, with thirty times as many of them"
	@echo "make bench   measure what the gateway costs"
	@echo "make hosts   try it in guests under QEMU, which takes hours; one of them: make hosts GUEST=debian12-arm64"
	@echo "make lint    lint, types and layers only"
	@echo "make clean   remove what these made"

setup:
	@scripts/setup

run: setup
	@exec .venv/bin/ringfence serve --demo

# The tests themselves are compiled once, and not by each worker for itself.
.tools/collected: $(shell find tests -name '*.py') | setup
	@mkdir -p .tools
	@$(PYTHON) -m pytest --collect-only -qq >$@.now || { cat $@.now; exit 1; }
	@mv $@.now $@

# The coverage table stands before pytest's last line, so that a log ends with what counts.
test:
	@scripts/setup --tests
	@$(MAKE) --no-print-directory lint .tools/collected
	@mkdir -p .tools && rm -f .coverage .coverage.*
	@core=$$($(PYTHON) -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")'); \
		COVERED=1 COVERAGE_CORE=$$core $(PYTHON) -m pytest -n $(JOBS) -m 'not slow' | tee .tools/pytest.log
	@$(PYTHON) -m coverage combine --quiet && $(PYTHON) -m coverage report
	@echo "left to make test-slow:" $(SLOW)
	@tail -n 1 .tools/pytest.log

# The files with tests that are slow by nature.
SLOW = $(shell grep -rlE 'mark\.slow\b' tests --include='test_*.py' | sort)

test-slow:
	@scripts/setup --tests
	@mkdir -p .tools
	@$(PYTHON) -m pytest -n $(JOBS) -m slow $(SLOW) | tee .tools/pytest-slow.log

QUICK := tests/core tests/config tests/audit tests/secrets tests/front tests/test_layout.py \
	tests/sandbox/files tests/sandbox/tools tests/sandbox/keeper tests/store/test_recovery.py \
	$(addprefix tests/governance/test_,$(addsuffix .py,disclosure effects facts guard journal pipeline))

quick: lint
	@$(PYTHON) -m pytest -q -n $(JOBS) $(QUICK)

# What a machine can try that makes no boxes, such as a container with its engine's defaults.
BOXLESS := tests/core tests/config tests/secrets tests/audit tests/store tests/front tests/test_layout.py \
	tests/sandbox/files tests/sandbox/tools tests/sandbox/keeper --ignore=tests/sandbox/files/test_guarded.py

boxless: lint
	@mkdir -p .tools
	@$(PYTHON) -m pytest -q -n $(JOBS) $(BOXLESS) | tee .tools/pytest.log

thorough: setup
	@$(PYTHON) -m pytest -q -n $(JOBS) -m hypothesis --hypothesis-profile thorough

bench: setup
	@.venv/bin/ringfence bench

# A guest that was tried with this code already is not tried again (AGAIN=--again: it is); `python -m hosts list` names them.
hosts: setup
	@$(PYTHON) -m hosts try $(GUEST) $(AGAIN)

lint: setup
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	.venv/bin/lint-imports

clean:
	rm -rf .venv .tools build dist htmlcov .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache
