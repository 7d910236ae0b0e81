# `make quickstart` and `make test` work on a fresh machine: they create a virtual environment and install the package.
PYTHON ?= python3
VENV ?= .venv
QUICKSTART_DIR ?= output/quickstart

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.timm-splicemix-installed

.PHONY: help quickstart test test-slow lint docs build bench clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

# The stamp is newer than the files that list the dependencies, so a second run installs nothing.
$(INSTALLED): setup.cfg pyproject.toml
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[export,hfds,plot,test,dev]'
	touch $@

quickstart: $(INSTALLED)  ## train with and without SpliceMix on generated images, and compare (5 minutes)
	$(BIN)/python -m timm_splicemix.quickstart --output $(QUICKSTART_DIR)

test: $(INSTALLED)  ## run the fast tests (a few minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-slow: $(INSTALLED)  ## run the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m slow

lint: $(INSTALLED) docs  ## check the style and build the API reference
	$(BIN)/ruff check .

docs: $(INSTALLED)  ## write the API reference to output/docs
	$(BIN)/python docs/build.py --output output/docs

build: $(INSTALLED)  ## build wheel and source distribution in dist/
	$(BIN)/python -m build

# table.py shows a script that started but did not end as crashed.
define benchmark
	@echo '{"script": "$(1)"}' >> $(BENCH_RESULTS)
	-$(BIN)/python benchmarks/$(1)
endef

bench: export BENCH_RESULTS = output/bench.jsonl
bench: $(INSTALLED)  ## run all benchmarks and print a table of claims, goals and results
	mkdir -p output && rm -f $(BENCH_RESULTS)
	$(call benchmark,mixer.py)
	$(call benchmark,mixer.py --threads 2 --at-least 1)
	$(call benchmark,mixer.py --channels-last --at-least 1)
	$(call benchmark,loader.py --workers 1)
	$(call benchmark,evaluation.py)
	$(call benchmark,metrics.py)
	$(call benchmark,labels.py)
	$(call benchmark,step.py)
	$(BIN)/python benchmarks/table.py $(BENCH_RESULTS)

clean:  ## remove the virtual environment and all generated files
	rm -rf $(VENV) output build dist *.egg-info
