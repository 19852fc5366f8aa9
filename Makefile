# `make serve` serves the default model; `make test` runs what CI runs. Both set themselves up first.
#
#   make serve ARGS="--port 9000"          options for `penstock serve`
#   make serve PYTHON=python3.12           the Python the environment is made from
#   make serve TORCH="torch==2.12.0"       the torch build to install, as pip writes it

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=

# Quiet twice: pip shows failures only.
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet --quiet
# A stamp is named after the torch it stands for: another TORCH installs again.
INSTALLED := $(VENV)/.installed-$(subst =,,$(subst /,_,$(firstword $(TORCH))))
INSTALLED_TEST := $(INSTALLED)-test

.PHONY: help serve test test-slow faults clean
.DELETE_ON_ERROR:

help:
	@echo "make serve       install Penstock into $(VENV), fetch the default model and serve it (ARGS=\"--port 9000\")"
	@echo "make test        lint, types and the whole test suite: what CI runs"
	@echo "make test-slow   the tests that take minutes"
	@echo "make faults      fault tests in their long form, soaks included: half an hour"
	@echo "make clean       remove $(VENV) and caches"

serve: $(INSTALLED)
	@exec $(VENV)/bin/penstock serve $(ARGS)

test: $(INSTALLED_TEST)
	@PATH="$$(cd $(VENV)/bin && pwd):$$PATH" scripts/check

test-slow: $(INSTALLED_TEST)
	@exec $(VENV)/bin/python -m pytest -m slow --hypothesis-profile=explore

faults: $(INSTALLED_TEST)
	@exec $(VENV)/bin/python -m pytest tests/faults -m "faults or not faults" --hypothesis-profile=explore -s

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The environment is complete only when pip is in it: an interrupted one is completed.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Penstock needs Python 3.11 or newer; name one: make serve PYTHON=python3.12" >&2; exit 1; }
	@echo "penstock: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot create an environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PIP) install --upgrade pip

# torch comes first and alone, so that the build named by TORCH is the one that stays.
$(INSTALLED): pyproject.toml | $(VENV)/bin/pip
	@rm -f $(VENV)/.installed*
	@echo "penstock: installing $(TORCH) (the largest part; minutes on a slow line)"
	@$(PIP) install $(TORCH)
	@echo "penstock: installing penstock and what it needs"
	@$(PIP) install --editable .
	@touch $@

$(INSTALLED_TEST): pyproject.toml $(INSTALLED)
	@echo "penstock: installing the test tools"
	@$(PIP) install --editable '.[test]'
	@touch $@
