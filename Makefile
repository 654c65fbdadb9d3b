PYTHON ?= python3
ARGS ?=

# The usual environment; and where a version of Python is named, one of its own beside it.
ifeq ($(origin PYTHON),file)
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none)
endif
PY := $(VENV)/bin/python
PIP := PIP_USER=0 $(PY) -m pip install --quiet --quiet --no-input --disable-pip-version-check

# The tests start thousands of processes; each would compile all modules again, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE

# A stamp is named after this folder, so that an environment copied along with the tree, whose scripts
# still point into the old one, is made anew.
HERE := $(shell printf '%s' '$(CURDIR)' | cksum | cut -d ' ' -f 1)
DEV := $(VENV)/.dev-$(HERE)
TEST := $(VENV)/.test-$(HERE)
BENCH := $(VENV)/.bench-$(HERE)
GONE := $(shell test -x $(PY) || echo $(TEST))

# The usual run of all tests ends with the fast ones on the other versions; one that was narrowed down does not.
ifeq ($(origin PYTHON)$(strip $(ARGS)),file)
BESIDE := $(MAKE) --no-print-directory versions || versions=$$?;
endif

PARALLEL := -n auto --dist worksteal
SESSIONS := -n 2 --dist worksteal
FOLDERS := $(wildcard tests/unit tests/property tests/tidy)
FAST := $(PARALLEL) -m "not serial and not slow and not spark" --hypothesis-profile=quick $(FOLDERS)

.DEFAULT_GOAL := help
.PHONY: help setup test versions fast django check sync docs demo bench clean $(GONE)

help: ## say what each target does
	@echo "Usage: make <target> [ARGS='...'] [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' Makefile

setup: $(DEV) ## make .venv and install Holdfast with its development tools
	@echo "The environment in $(VENV) is ready: $$($(PY) --version)."

test: $(DEV) ## run every test; ARGS go to pytest (ARGS='-k torn', ARGS=--long)
	@tools/browser.sh
	@tools/postgres.sh
	@echo "Running the tests on all cores, then those on Spark in two sessions, then those that need the machine for themselves."
	@shared=0; spark=0; serial=0; versions=0; \
	$(PY) -m pytest $(PARALLEL) -m "not serial and not spark" $(ARGS) || shared=$$?; \
	$(PY) -m pytest $(SESSIONS) -m "spark and not serial" $(ARGS) || spark=$$?; \
	$(PY) -m pytest -m serial $(ARGS) || serial=$$?; \
	$(BESIDE) \
	case "$$shared $$spark $$serial" in "5 5 5") echo "No test matches." >&2; exit 5 ;; esac; \
	for code in $$shared $$spark $$serial $$versions; do \
		case $$code in 0|5) ;; *) echo "Some tests failed." >&2; exit $$code ;; esac; \
	done; \
	echo "All tests passed."

versions: $(TEST) ## run the fast tests, and Django's, on the other supported versions of Python that are found here
	@failed=0; \
	for python in $$(tools/pythons.sh "$(PY)"); do \
		$(MAKE) --no-print-directory fast django PYTHON="$$python" || failed=1; \
	done; \
	exit $$failed

# Django has tasks since 6.0, which needs Python 3.12: the usual environment may have those of django-tasks instead.
django: $(TEST)
	@echo "Running the tests of Django's tasks on $$($(PY) --version)."
	@$(PY) -m pytest $(PARALLEL) tests/integration/test_django_tasks.py $(ARGS)

fast: $(TEST) ## run the fast tests; PYTHON=python3.13 on that version
	@echo "Running the fast tests on $$($(PY) --version): $(FOLDERS)."
	@$(PY) -m pytest $(FAST) $(ARGS)

check: $(DEV) ## format, lint, types, import rules and the fast tests, in under two minutes
	@echo "Checking that the modules for threads are those made of the modules for tasks."
	@$(PY) tools/sync.py --check
	@echo "Checking the format."
	@$(PY) -m ruff format --check .
	@echo "Checking the code with ruff."
	@$(PY) -m ruff check .
	@echo "Checking the types with mypy."
	@$(PY) -m mypy
	@echo "Checking that modules import downwards only."
	@$(VENV)/bin/lint-imports --no-logo --no-cache
	@echo "Running the fast tests: $(FOLDERS)."
	@$(PY) -m pytest $(FAST) $(ARGS)
	@echo "All checks passed."

sync: $(DEV) ## write the modules for threads anew from those for tasks
	@$(PY) tools/sync.py

docs: $(DEV) ## build the documentation into build/docs; a broken link fails
	@version=$$($(PY) -c 'import holdfast; print(holdfast.__version__)'); \
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs --quiet build --strict --site-dir "build/docs/$$version" && \
	echo "The documentation is built: open build/docs/$$version/index.html in a browser."

demo: $(DEV) ## run examples/demo.py
	@echo "Running examples/demo.py."
	@$(PY) examples/demo.py $(ARGS)

bench: $(BENCH) ## measure the hot paths against peers; ARGS go to python -m bench
	@echo "Running the benchmarks."
	@$(PY) -m bench $(ARGS)

clean: ## remove all environments, caches and everything built
	@echo "Removing .venv and those of other versions, caches and build results."
	@rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(TEST): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Holdfast needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one, for example: make setup PYTHON=python3.12" >&2; exit 1; }
	@if ! ls $(VENV)/.*-$(HERE) >/dev/null 2>&1 || ! $(PY) -c '' 2>/dev/null; then \
		echo "Making a virtual environment in $(VENV) with $$($(PYTHON) --version)."; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo "Installing Holdfast and what its fast tests need into $(VENV)."
	@$(PIP) --editable '.[test]'
	@touch $@

$(DEV): $(TEST)
	@echo "Installing the development tools into $(VENV); the first time takes minutes: Spark is large."
	@$(PIP) --editable '.[dev]'
	@touch $@

$(BENCH): $(DEV)
	@echo "Installing what the benchmarks compare with into $(VENV)."
	@$(PIP) --editable '.[bench]'
	@touch $@
