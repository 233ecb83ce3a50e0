# demo | test | lint | bench: each sets up .venv first, from the default package index.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint bench

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/speed.py
	@$(BIN)/python benchmarks/cpu_accuracy.py
	@$(BIN)/python benchmarks/checkpointing.py --quick

$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up .venv (torch and the tools; once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
