# make train   set everything up, then run the main job
# make test    set everything up, then run the tests
# make help    list the other targets

# The first interpreter that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LINTED := $(wildcard placements dtensor_owner tests benchmarks docs)
TYPED := $(wildcard placements dtensor_owner)

.PHONY: help setup train test test-all lint format

help:
	@echo "make setup     create $(VENV) with the tested versions (constraints.txt)"
	@echo "make train     setup, then dtensor-owner train; ARGS='--steps 50' passes options on"
	@echo "make test      setup, then the tests; ARGS='-k owner' passes options on"
	@echo "make test-all  setup, then the tests with the slow ones"
	@echo "make lint      setup, then ruff check, ruff format --check and mypy"
	@echo "make format    setup, then let ruff rewrite the files"

setup: $(STAMP)

# Installed again only when what should be installed has changed. Only what is imported is compiled.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found. Install one or set PYTHON=/path/to/python."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[train,test,dev]'
	@touch $(STAMP)

train: $(STAMP)
	$(BIN)/dtensor-owner train $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(if $(TYPED),$(BIN)/mypy $(TYPED))

format: $(STAMP)
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)
