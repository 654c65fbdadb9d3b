PYTHON ?= python3
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := PIP_USER=0 $(PY) -m pip install --quiet --quiet --no-input --disable-pip-version-check

# A stamp is named after this folder, so that an environment copied along with the tree, whose scripts
# still point into the old one, is made anew.
HERE := $(shell printf '%s' '$(CURDIR)' | cksum | cut -d ' ' -f 1)
DEV := $(VENV)/.dev-$(HERE)
BENCH := $(VENV)/.bench-$(HERE)
GONE := $(shell test -x $(PY) || echo $(DEV))

PARALLEL := -n auto --dist worksteal
SESSIONS := -n 2 --dist worksteal
FAST := $(wildcard tests/unit tests/property tests/tidy)

.DEFAULT_GOAL := help
.PHONY: help setup test check demo bench clean $(GONE)

help: ## say what each target does
	@echo "Usage: make <target> [ARGS='...'] [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-7s %s\n", $$1, $$2 }' Makefile

setup: $(DEV) ## make .venv and install Holdfast with its development tools
	@echo "The environment in $(VENV) is ready: $$($(PY) --version)."

test: $(DEV) ## run every test; ARGS go to pytest (ARGS='-k torn', ARGS=--long)
	@tools/browser.sh
	@echo "Running the tests on all cores, then those on Spark in two sessions, then those that need the machine for themselves."
	@shared=0; spark=0; serial=0; \
	$(PY) -m pytest $(PARALLEL) -m "not serial and not spark" $(ARGS) || shared=$$?; \
	$(PY) -m pytest $(SESSIONS) -m "spark and not serial" $(ARGS) || spark=$$?; \
	$(PY) -m pytest -m serial $(ARGS) || serial=$$?; \
	case "$$shared $$spark $$serial" in "5 5 5") echo "No test matches." >&2; exit 5 ;; esac; \
	for code in $$shared $$spark $$serial; do \
		case $$code in 0|5) ;; *) echo "Some tests failed." >&2; exit $$code ;; esac; \
	done; \
	echo "All tests passed."

check: $(DEV) ## format, lint, types, import rules and the fast tests, in under two minutes
	@echo "Checking the format."
	@$(PY) -m ruff format --check .
	@echo "Checking the code with ruff."
	@$(PY) -m ruff check .
	@echo "Checking the types with mypy."
	@$(PY) -m mypy
	@echo "Checking that modules import downwards only."
	@$(VENV)/bin/lint-imports --no-logo --no-cache
	@echo "Running the fast tests: $(FAST)."
	@$(PY) -m pytest $(PARALLEL) -m "not serial and not slow and not spark" --hypothesis-profile=quick $(FAST) $(ARGS)
	@echo "All checks passed."

demo: $(DEV) ## run examples/demo.py
	@echo "Running examples/demo.py."
	@$(PY) examples/demo.py $(ARGS)

bench: $(BENCH) ## measure the hot paths against peers; ARGS go to python -m bench
	@echo "Running the benchmarks."
	@$(PY) -m bench $(ARGS)

clean: ## remove .venv, caches and everything built
	@echo "Removing $(VENV), caches and build results."
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(DEV): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Holdfast needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one, for example: make setup PYTHON=python3.12" >&2; exit 1; }
	@if [ ! -e $@ ] || ! $(PY) -c '' 2>/dev/null; then \
		echo "Making a virtual environment in $(VENV) with $$($(PYTHON) --version)."; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo "Installing Holdfast and its development tools into $(VENV); the first time takes minutes: Spark is large."
	@$(PIP) --editable '.[dev]'
	@touch $@

$(BENCH): $(DEV)
	@echo "Installing what the benchmarks compare with into $(VENV)."
	@$(PIP) --editable '.[bench]'
	@touch $@
