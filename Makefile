# `make quickstart` and `make test` do everything on a fresh machine: they create the virtual environment, install and run.
PYTHON ?= python3
VENV ?= .venv
QUICKSTART_DIR ?= output/quickstart

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.timm-splicemix-installed

.PHONY: help quickstart test test-slow lint bench clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

# The stamp is newer than what names the dependencies, so a second run installs nothing.
$(INSTALLED): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[plot,test,dev]'
	touch $@

quickstart: $(INSTALLED)  ## generate the embedded data set and draw a SpliceMixed batch of it
	$(BIN)/python -m timm_splicemix.preview --dataset shapes --data-dir $(QUICKSTART_DIR)/shapes \
		--output $(QUICKSTART_DIR)/preview.png

test: $(INSTALLED)  ## run the tests (a few minutes)
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)  ## run the tests that take long
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)  ## check style
	$(BIN)/ruff check .

bench: $(INSTALLED)  ## run the benchmarks
	$(BIN)/python benchmarks/mixer.py

clean:  ## remove the virtual environment and everything generated
	rm -rf $(VENV) output build dist *.egg-info
