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

quickstart: $(INSTALLED)  ## generate the embedded data set, draw a mixed batch and train a model
	$(BIN)/python -m timm_splicemix.preview --dataset shapes --data-dir $(QUICKSTART_DIR)/shapes \
		--batch-size 8 --img-size 112 --columns 8 --splicemix-ratio 0.5 --splicemix-mode elem --seed 7 \
		--output $(QUICKSTART_DIR)/preview.png
	$(BIN)/python train.py --dataset shapes --data-dir $(QUICKSTART_DIR)/shapes --output $(QUICKSTART_DIR) --experiment run \
		--model test_resnet --img-size 96 --gp max --splicemix-grids 1x2,2x2 --splicemix-cl --decoder torchvision \
		--scale 0.6 1 --color-jitter 0 --train-interpolation bilinear --opt adamw --lr 4e-3 --weight-decay 0.02 \
		--warmup-epochs 1 --epochs 8 --batch-size 32 --workers 1 --checkpoint-hist 1 --log-interval 20
	@echo 'Picture     $(QUICKSTART_DIR)/preview.png'

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

bench: export BENCH_RESULTS = output/bench.jsonl
bench: $(INSTALLED)  ## run all benchmarks and print a table of claims, goals and results
	mkdir -p output && rm -f $(BENCH_RESULTS)
	-$(BIN)/python benchmarks/mixer.py
	-$(BIN)/python benchmarks/mixer.py --threads 2 --at-least 1
	-$(BIN)/python benchmarks/mixer.py --channels-last --at-least 1
	-$(BIN)/python benchmarks/loader.py --workers 1
	-$(BIN)/python benchmarks/evaluation.py
	-$(BIN)/python benchmarks/metrics.py
	-$(BIN)/python benchmarks/labels.py
	-$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/table.py $(BENCH_RESULTS)

clean:  ## remove the virtual environment and all generated files
	rm -rf $(VENV) output build dist *.egg-info
