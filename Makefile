# `make pretrain` and `make test` need Python >= 3.11, pip and a C compiler; nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STORE ?= data/stores/stdlib
TOKENIZER ?= data/tokenizers/stdlib
CONFIG ?= configs/quickstart.yaml
RUN ?= runs/quickstart
# Three test processes for two cores: many tests wait, for a time-out or for another process.
WORKERS ?= 3
# Many containers set it, and then every process of the tests compiles the package and itself anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# A quick test that hangs ends its process with the stacks of its threads, and fails.
NO_HANGS = -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# A folder that `make wheels` has filled; everything is installed from there, without a network.
WHEELS ?=
PIP = $(BIN)/python -m pip install --quiet --constraint constraints.txt \
	$(if $(WHEELS),--no-index --find-links $(abspath $(WHEELS)))
# A GPU machine's card, Python, and the packages that it lacks: make gpu-pack GPU=h200 GPU_WHEELS="torchao==0.17.0 …"
GPU ?= h100
GPU_PYTHON ?= 3.12
GPU_WHEELS ?= torchao==0.17.0
# Processes of `make pretrain`: one per GPU, or two on a machine without one.
NPROC ?= $(shell $(BIN)/python -c "from llm_pretrain.hardware import gpu_count; print(gpu_count() or 2)" 2>/dev/null)

.PHONY: help setup pretrain store test test-ci test-cuda test-slow test-faults test-lowest fuzz mutate gpu-pack wheels lint bench docs docs-site clean

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

# Where a GPU answers, torch comes from the package index with its CUDA libraries; elsewhere the same
# version's CPU build serves. Both are pinned in constraints.txt.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing torch and other packages into $(VENV), which may take minutes without a message"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	PYTHONWARNINGS=ignore $(PIP) --editable ".[gguf]"
	touch $@

# What only the tests need is large (a browser's driver, llama.cpp), so training does not wait for it.
# DeepSpeed comes as source that imports torch while it is built; nothing is compiled.
$(VENV)/.installed-tests: $(VENV)/.installed
	PYTHONWARNINGS=ignore $(PIP) --editable ".[test]"
	$(PIP) setuptools wheel
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation "$$(grep '^deepspeed==' constraints.txt)"
	touch $@

# What exported weights are evaluated and tuned with.
$(VENV)/.installed-readers: $(VENV)/.installed-tests
	PYTHONWARNINGS=ignore $(PIP) --editable ".[readers]"
	touch $@

# What pyproject.toml promises at its lowest, in an environment of its own; torch comes with its CUDA libraries.
$(VENV)-lowest/.installed: pyproject.toml constraints.txt tests/lowest_versions.py
	$(PYTHON) -m venv $(VENV)-lowest
	$(PYTHON) tests/lowest_versions.py > $(VENV)-lowest/constraints.txt
	PYTHONWARNINGS=ignore $(VENV)-lowest/bin/python -m pip install --quiet \
		--constraint $(VENV)-lowest/constraints.txt --editable ".[test]"
	touch $@

# Beside the environment, not in it: with Triton installed a CPU's torch takes other paths.
$(VENV)-triton/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)-triton triton==3.7.0
	touch $@

setup: $(VENV)/.installed-tests  ## Make .venv with everything; without a network: make setup WHEELS=FOLDER

# The project's own wheel is not wanted: the checkout is installed. DeepSpeed is built here as it is in `setup`.
wheels: TO = $(or $(WHEELS),wheels)
wheels: WHEEL = $(BIN)/python -m pip wheel --quiet --constraint constraints.txt --wheel-dir $(TO)
wheels:  ## Download what `make setup` installs, for machines without a network: make wheels WHEELS=FOLDER
	$(MAKE) $(VENV)/.installed-tests WHEELS=
	PYTHONWARNINGS=ignore $(WHEEL) pip setuptools wheel "$$(grep '^torch==' constraints.txt)" ".[gguf,test]"
	rm -f $(TO)/llm_pretrain-*.whl
	DS_BUILD_OPS=0 $(WHEEL) --no-build-isolation "$$(grep '^deepspeed==' constraints.txt)"
	@du -sh $(TO)

$(TOKENIZER)/tokenizer.json: | $(VENV)/.installed
	$(BIN)/llm-pretrain tokenizer --input stdlib --vocab_size 4096 --output $(TOKENIZER)

$(STORE)/store.json: $(TOKENIZER)/tokenizer.json
	$(BIN)/llm-pretrain prepare --input stdlib --tokenizer $(TOKENIZER) --output $(STORE) --validation_fraction 0.03 --overwrite

store: $(STORE)/store.json  ## Tokenizer and token store of the embedded corpus

pretrain: $(STORE)/store.json  ## Pretrain a small mixture of experts on the embedded corpus
	PYTORCH_ALLOC_CONF=expandable_segments:True $(BIN)/llm-pretrain train --nproc $(NPROC) --config $(CONFIG)
	@echo; echo "A sample:"
	@$(BIN)/llm-pretrain generate $(RUN) --prompt "$$(printf 'import os\n\n\ndef ')" --max_new_tokens 64 --temperature 0.8
	@echo
	@echo "The run is in $(RUN); $(RUN)/report.html shows it. Try next:"
	@echo "  $(BIN)/llm-pretrain generate $(RUN) --prompt 'import '"
	@echo "  $(BIN)/torchrun --nproc_per_node $(NPROC) train_pretrain.py --config $(CONFIG) --training.max_steps 1000"
	@echo "  $(BIN)/llm-pretrain train --launcher accelerate --nproc $(NPROC) --config $(CONFIG) \\"
	@echo "      --run.name quickstart-accelerate"

test: $(VENV)/.installed-tests  ## The quick suite
	$(PYTEST) -m "not slow" $(NO_HANGS)

test-ci: $(VENV)/.installed-tests  ## The slow tests of launchers, strategies, traps, compiling and whole journeys, which CI runs too
	$(PYTEST) -m slow tests/distributed tests/traps tests/end_to_end/test_user_journey.py \
		tests/training/test_compiling.py

test-cuda: $(VENV)/.installed-tests $(VENV)-triton/.installed  ## What a GPU would run, on fake tensors and without one
	PYTHONPATH=tests/cuda_without_gpu:$(VENV)-triton $(PYTEST) --dist load -p fake_cuda tests/cuda_without_gpu

test-slow: $(VENV)/.installed-readers  ## Every slow test but the faults (nightly)
	$(PYTEST) -m slow --ignore tests/faults

test-faults: $(VENV)/.installed-tests  ## Every fault: kills, full disks, damage, lost networks (nightly; an hour or more)
	$(PYTEST) --dist worksteal tests/faults

test-lowest: BIN = $(VENV)-lowest/bin
test-lowest: $(VENV)-lowest/.installed  ## The quick suite, test-cuda and launches on idle GPUs with the lowest versions promised (nightly; 6 GB of packages)
	$(PYTEST) -m "not slow"
	PYTHONPATH=tests/cuda_without_gpu $(PYTEST) --dist load -p fake_cuda tests/cuda_without_gpu
	$(PYTEST) --dist load -m slow tests/idle_gpu

fuzz: $(VENV)/.installed-tests  ## Look for input that breaks a reader, for longer than the tests do
	FUZZ_EXAMPLES=$(or $(EXAMPLES),2000) $(PYTEST) -m fuzz

# The map is of one commit, as the rows are: other files for another commit.
MUTANTS ?= runs/mutants
$(MUTANTS)/map.json: | $(VENV)/.installed-tests
	mkdir -p $(MUTANTS)
	$(BIN)/python tests/mutation_score.py map $@

mutate: $(MUTANTS)/map.json  ## Count how many small faults the quick tests detect: make mutate COUNT=10 MUTANTS=FOLDER
	$(BIN)/python tests/mutation_score.py run $< $(MUTANTS)/rows.jsonl --count $(or $(COUNT),100)

bench: $(STORE)/store.json  ## Measure everything, or one part: make bench NAME=startup; see docs/benchmarks.md
	$(BIN)/python -m benchmarks $(or $(NAME),all --quick)

gpu-pack: $(VENV)/.installed-tests $(VENV)-triton/.installed  ## What `python3 -m benchmarks gpu` needs on a GPU machine without a network
	$(BIN)/python -m benchmarks.gpu.pack $(GPU_WHEELS) --python $(GPU_PYTHON) --gpu $(GPU)

lint: $(VENV)/.installed-tests  ## Lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed  ## Write docs/configuration.md from the docstrings of the settings
	$(BIN)/python -m llm_pretrain.config.reference > docs/configuration.md

# Neither the package nor torch is needed: the API reference reads the sources without importing them.
$(VENV)-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --constraint constraints.txt \
		$$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

docs-site: $(VENV)-docs/.installed  ## Build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet

clean:  ## Remove the environments and everything generated
	rm -rf $(VENV) $(VENV)-docs $(VENV)-lowest $(VENV)-triton site runs data/stores data/tokenizers build *.egg-info
