# `make quickstart` and `make test` need nothing but Python 3.11 or 3.12, make and a network to a Python package index.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
VLLM   := $(VENV)/vllm
# The tests that the targets run: `make test-long` selects the others.
SELECTED ?= not long
COMMANDS := tests/ray/test_quickstart.py tests/ray/test_benchmarks.py
export OMP_NUM_THREADS ?= 1
export DS_BUILD_OPS := 0
# DeepSpeed's installation asks for nvcc on a machine with a GPU, although nothing is compiled.
export DS_IGNORE_CUDA_DETECTION := 1
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

# Container images often set it. The tests start hundreds of processes, each of which would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

MAKEFLAGS += --no-print-directory

.PHONY: help install install-gpu quickstart showcase results docs test test-fast test-long test-chaos test-ray test-serve test-unit test-benchmarks \
        test-quickstart test-vllm lint clean install-vllm

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(or $(wildcard $(VENV)/installed-gpu),$(VENV)/installed)  ## create .venv and install everything (only when pyproject.toml or constraints.txt changed)

install-gpu: $(VENV)/installed-gpu  ## the same for NVIDIA GPUs: CUDA builds of torch and faiss, and vLLM; needs a driver, no nvcc

$(VENV)/installed: pyproject.toml constraints.txt
	@$(call install,constraints.txt,cpu)
	@touch $@

$(VENV)/installed-gpu: pyproject.toml constraints-gpu.txt
	@# faiss-cpu installs the same module as faiss-gpu.
	@if $(PY) -m pip --version >/dev/null 2>&1; then $(PY) -m pip uninstall -qq -y --disable-pip-version-check faiss-cpu; fi
	@$(call install,constraints-gpu.txt,gpu)
	@touch $@ $(VENV)/installed
	-@$(VENV)/bin/pixelis doctor

# $(call install,CONSTRAINTS,EXTRA)
define install
	set -e; \
	$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] < (3, 13); sys.exit(0 if ok else "Pixelis needs Python 3.11 or 3.12, this is " + sys.version.split()[0] + ". Name another with: make PYTHON=python3.11 ...")'; \
	echo "[1/3] creating the virtual environment $(VENV)"; \
	: "An attempt without the package python3-venv leaves a Python without pip, which a second one completes."; \
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); \
	date +%s > $(VENV)/install-started; \
	: "Python compiles the files that are imported; compiling all of them would take a minute."; \
	echo "[2/3] installing torch (the largest part)"; \
	$(PY) -m pip install -qq --no-compile --disable-pip-version-check -c $(1) torch setuptools wheel; \
	echo "[3/3] installing Pixelis and its dependencies (1-4 minutes)"; \
	$(PY) -m pip install -qq --no-compile --disable-pip-version-check -c $(1) --no-build-isolation -e '.[$(2),nano,dev,docs]'; \
	: "rapidocr wants opencv's plain build, which shares a folder with the contrib build that has the tracker: the latter goes last."; \
	$(PY) -m pip install -qq --no-compile --disable-pip-version-check -c $(1) --force-reinstall --no-deps opencv-contrib-python-headless; \
	echo $$(( $$(date +%s) - $$(cat $(VENV)/install-started) )) > $(VENV)/install-seconds
endef

quickstart: install  ## train, evaluate and serve the embedded model (about ten minutes on two cores)
	@$(VENV)/bin/pixelis quickstart

showcase: install  ## the same for six operations: pictures, words, clips (about thirty-five minutes on two cores)
	@$(VENV)/bin/pixelis quickstart configs/mini/quickstart.yaml

test: install  ## every check, and all tests but the long ones; the output of each lane is in runs/tests
	@$(PY) tests/lanes.py install-vllm test-serve test-ray test-chaos test-vllm test-quickstart test-benchmarks --beside lint docs test-unit

test-fast: install lint  ## what to run on every change: lint and the quick tests
	@$(PY) -m pytest -n 2 --dist loadfile -m "not slow and not long" tests/unit tests/properties

test-long: install  ## the long tests, which `make test` leaves out: more faults, worlds, benchmarks and models
	@SELECTED=long $(PY) tests/lanes.py install-vllm test-serve test-chaos test-ray test-vllm test-benchmarks --beside test-unit

test-chaos: install
	@$(PY) -m pytest -m "$(SELECTED)" tests/chaos

test-ray: install
	@$(PY) -m pytest -m "$(SELECTED)" tests/ray $(COMMANDS:%=--ignore=%)

test-serve: install
	@$(PY) -m pytest -m "$(SELECTED)" tests/serve

# Commands as users run them, on clusters of their own.
test-benchmarks: install
	@$(PY) -m pytest -m "$(SELECTED)" tests/ray/test_benchmarks.py

test-quickstart: install
	@$(PY) -m pytest tests/ray/test_quickstart.py

test-unit: install
	@$(PY) -m pytest -n 2 --dist loadfile -m "$(SELECTED)" tests/unit tests/properties tests/engines

test-vllm: $(VLLM)/installed
	@$(VLLM)/bin/python -m pytest -m "slow and ($(SELECTED))" tests/engines

install-vllm: $(VLLM)/installed

# vLLM's CPU build, for its tests only: a second environment on top of the first, so that nothing else meets its versions.
$(VLLM)/installed: $(VENV)/installed tests/engines/requirements.txt
	@echo "installing the CPU build of vLLM for its tests"
	@test -x $(VLLM)/bin/python || $(PY) -m venv --without-pip $(VLLM)
	@$(VLLM)/bin/python -c 'import sys, sysconfig; open(sysconfig.get_path("purelib") + "/base.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})\n")' "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@$(PY) -m pip --python $(VLLM)/bin/python install -qq --no-compile --disable-pip-version-check --no-deps -r tests/engines/requirements.txt
	@touch $@

lint: install  ## ruff's checks and format, mypy and the dependency rules
	@$(VENV)/bin/ruff check pixelis tests benchmarks docs scripts
	@$(VENV)/bin/ruff format --check pixelis tests benchmarks docs scripts
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo

results: install  ## the figures of docs/results.md that two cores measure in two to three hours, in runs/results; resumes
	@# One of the runs compares with TRL.
	@$(PY) -c 'import trl' 2>/dev/null || $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt 'trl==1.16.*' datasets
	@$(PY) -m benchmarks.results

docs: install  ## the documentation site in runs/site; broken links and unknown names are errors
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

clean:  ## remove the virtual environment and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
