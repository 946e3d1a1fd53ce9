# make run    install, then the quickstart: four federated runs on the built-in data, a table, a picture and a page
# make test   install, then lint, types and the test suite
# make test-all   also the slow tests, and those of the extra datasets, which it installs
# make test-gpu   the tests that need a CUDA GPU; the suite itself does without, also where there is one
# make chaos MINUTES=10 SEED=7   random kills, damaged files and wrong values (tests/faults/campaign.py); ONLY=files:17
# make docs   the site from docs/ and results/, in build/site; also runs the notebook
# make audit   known vulnerabilities of the pinned packages, and build/sbom.json, a software bill of materials
# make clean   remove what these make again; runs/, which may be results of hours, stays
PYTHON ?= python3
# Two processes, whatever the machine; tests/conftest.py says which tests stay together.
PYTEST = $(BIN)/python -m pytest -n 2
# torch is some hundred MB: a network that stalls for a while is waited for.
PATIENCE = --timeout 60 --retries 10
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PATIENCE) -c constraints.txt
STAMP := $(VENV)/.installed
AUDIT := $(VENV)/audit
MINUTES ?= 10
SEED ?= 7

.PHONY: run test test-all test-gpu chaos docs audit lint clean

run: $(STAMP)
	$(BIN)/fedeas quickstart

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(INSTALL) -e ".[dev,datasets]"
	$(PYTEST)

test-gpu: $(STAMP)
	FEDEAS_TEST_GPU=1 $(PYTEST) -m gpu

chaos: $(STAMP)
	PYTHONPATH=.:tests/helpers $(BIN)/python tests/faults/campaign.py --seed $(SEED) --minutes $(MINUTES) \
		$(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

docs: $(STAMP)
	$(INSTALL) -e ".[dev,docs]"
	$(BIN)/python -m pytest tests/test_site.py
	$(BIN)/python -m mkdocs build --strict

# An environment of its own, so that the tools' dependencies are not among those of the project.
audit:
	test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check $(PATIENCE) pip-audit==2.10.1 cyclonedx-bom==7.5.0
	mkdir -p build
	$(AUDIT)/bin/cyclonedx-py requirements --output-reproducible --output-file build/sbom.json constraints.txt
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
