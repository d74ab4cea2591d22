# `make pretrain` and `make test` need Python >= 3.11, pip and a C compiler; nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STORE ?= data/stores/stdlib
TOKENIZER ?= data/tokenizers/stdlib
CONFIG ?= configs/quickstart.yaml
RUN ?= runs/quickstart
# Processes of `make pretrain`: one per GPU, or two on a machine without one.
NPROC ?= $(shell $(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)" 2>/dev/null)

.PHONY: help setup pretrain store test test-slow test-faults fuzz lint bench docs clean

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

# Where a GPU answers, torch comes from the package index with its CUDA libraries; elsewhere the same
# version's CPU build serves. Both are pinned in constraints.txt.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[gguf]"
	touch $@

# What only the tests need is large (a browser's driver, llama.cpp), so training does not wait for it.
# DeepSpeed comes as source that imports torch while it is built; nothing is compiled.
$(VENV)/.installed-tests: $(VENV)/.installed
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation "$$(grep '^deepspeed==' constraints.txt)"
	touch $@

setup: $(VENV)/.installed-tests  ## Make .venv with everything

$(TOKENIZER)/tokenizer.json: | $(VENV)/.installed
	$(BIN)/llm-pretrain tokenizer --input stdlib --vocab_size 4096 --output $(TOKENIZER)

$(STORE)/store.json: $(TOKENIZER)/tokenizer.json
	$(BIN)/llm-pretrain prepare --input stdlib --tokenizer $(TOKENIZER) --output $(STORE) --validation_fraction 0.03 --overwrite

store: $(STORE)/store.json  ## Tokenizer and token store of the embedded corpus

pretrain: $(STORE)/store.json  ## Pretrain a small mixture of experts on the embedded corpus
	PYTORCH_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node $(NPROC) train_pretrain.py --config $(CONFIG)
	@echo; echo "A sample:"
	@$(BIN)/llm-pretrain generate $(RUN) --prompt "def " --max_new_tokens 64 --temperature 0.8
	@echo
	@echo "The run is in $(RUN); $(RUN)/report.html shows it. Try next:"
	@echo "  $(BIN)/llm-pretrain generate $(RUN) --prompt 'import '"
	@echo "  $(BIN)/torchrun --nproc_per_node $(NPROC) train_pretrain.py --config $(CONFIG) --training.max_steps 1000"
	@echo "  $(BIN)/accelerate launch --config_file configs/accelerate/cpu2.yaml \\"
	@echo "      train_pretrain_accelerate.py --config $(CONFIG) --run.name quickstart-accelerate"

test: $(VENV)/.installed-tests  ## The test suite, without what takes minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(VENV)/.installed-tests  ## What takes minutes, but for the faults
	$(BIN)/python -m pytest -m slow --ignore tests/faults

test-faults: $(VENV)/.installed-tests  ## Every fault: kills, full disks, damage, lost networks (an hour or more)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/faults

fuzz: $(VENV)/.installed-tests  ## Look for input that breaks a reader, for longer than the tests do
	FUZZ_EXAMPLES=$(or $(EXAMPLES),20000) $(BIN)/python -m pytest -n 2 --dist loadfile -m fuzz

bench: $(STORE)/store.json  ## Measure everything, or one part: make bench NAME=startup; see docs/benchmarks.md
	$(BIN)/python -m benchmarks $(or $(NAME),all --quick)

lint: $(VENV)/.installed-tests  ## Lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed  ## Write docs/configuration.md from the docstrings of the settings
	$(BIN)/python -m llm_pretrain.config.reference > docs/configuration.md

clean:  ## Remove the environment and everything generated
	rm -rf $(VENV) runs data/stores data/tokenizers build *.egg-info
