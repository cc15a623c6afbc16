# `make quickstart` and `make test` need nothing but Python 3.11, make and a network to a Python package index.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
export OMP_NUM_THREADS ?= 1
export DS_BUILD_OPS := 0
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

.PHONY: help install quickstart test lint clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(VENV)/installed  ## create .venv and install everything (only when pyproject.toml or constraints.txt changed)

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] < (3, 13); sys.exit(0 if ok else "Pixelis needs Python 3.11 or 3.12, this is " + sys.version.split()[0] + ". Name another with: make PYTHON=python3.11 ...")'
	@echo "[1/3] creating the virtual environment $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@date +%s > $(VENV)/install-started
	@echo "[2/3] installing torch (the largest part)"
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt torch setuptools wheel
	@echo "[3/3] installing Pixelis and its dependencies (1-4 minutes)"
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@# rapidocr wants opencv's plain build, which shares a folder with the contrib build that has the tracker: the latter goes last.
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt --force-reinstall --no-deps opencv-contrib-python-headless
	@echo $$(( $$(date +%s) - $$(cat $(VENV)/install-started) )) > $(VENV)/install-seconds
	@touch $@

quickstart: install  ## train, evaluate and serve the embedded model (about ten minutes on two cores)
	@$(PY) -m pixelis.jobs.quickstart configs/nano/quickstart.yaml

test: install lint  ## every check and test
	@$(PY) -m pytest

lint: install  ## ruff, mypy and the dependency rules
	@$(VENV)/bin/ruff check pixelis tests benchmarks docs
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo

clean:  ## remove the virtual environment and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
