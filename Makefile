# Two commands from a bare machine: `make quickstart` and `make test`. `make help` lists the rest; recipes take SEED=7.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
SEED   ?= 0
PEERS  := trl ifeval gem openenv inspect lm-eval trackio
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help quickstart test test-busy test-slow test-peers record-peers soak check format smollm2 tiny tiny-even tiny-moe multi-domain \
	frozen-lake sokoban webshop long-context chain multi-domain-smollm2 frozen-lake-smollm2 sokoban-smollm2 webshop-smollm2 bench bench-env \
	peers vllm system clean
.DEFAULT_GOAL := help

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

quickstart: $(VENV)/installed ## install and train a tiny language model in minutes (SEED=7 takes another seed)
	$(BIN)/drumroll train recipes/quickstart/recipe.yaml seed=$(SEED) --overwrite

test: system $(VENV)/installed-dev ## install what tests need, then run every part: lint, types, tests, numerics on other CPUs
	$(BIN)/python tools/suite.py

test-busy: system $(VENV)/installed-dev ## the same beside four busy loops; takes as long as it takes
	$(BIN)/python tools/suite.py --busy 4

test-slow: system $(VENV)/installed-slow ## install vLLM and Ray's job tool, then run the long tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not peers" --numprocesses 2 --dist loadgroup --durations 20

test-peers: peers ## install the libraries that we compare ourselves with, then compare (make test compares with recordings of them)
	$(BIN)/python -m pytest -m peers

record-peers: peers ## write tests/recordings anew, from the installed libraries
	$(BIN)/python -m pytest -m peers --record

soak: $(VENV)/installed-dev ## the scheduler in 10,000 simulated worlds
	$(BIN)/python -m pytest tests/simulation --worlds 10000

check: $(VENV)/installed-dev ## lint, type-check, and check the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-cache

format: $(VENV)/installed-dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

smollm2: $(VENV)/installed-dev ## bring SmolLM2-135M-Instruct into the cache as a Hugging Face directory
	$(BIN)/python -m drumroll.models.smollm2

tiny tiny-even tiny-moe: $(VENV)/installed
	$(BIN)/drumroll train recipes/tiny-weak/recipe.yaml name=$@-weak model=$@-random seed=$(SEED) --overwrite
	$(BIN)/python -m drumroll.models.tiny $@ runs/$@-weak/model

tiny: ## make the built-in tiny model anew
tiny-even: ## make the built-in model with an even number of heads anew
tiny-moe: ## make the built-in mixture of experts anew

multi-domain: $(VENV)/installed-dev system ## five domains at once: make the start model and the judge, then train
	$(BIN)/drumroll train recipes/multi-domain/judge.yaml seed=$(SEED) --overwrite
	$(BIN)/drumroll train recipes/multi-domain/warm-start.yaml seed=$(SEED) --overwrite
	$(BIN)/drumroll train recipes/multi-domain/recipe.yaml seed=$(SEED) --overwrite

frozen-lake sokoban webshop: $(VENV)/installed-dev
	$(BIN)/drumroll train recipes/$@/warm-start.yaml seed=$(SEED) --overwrite
	$(BIN)/drumroll train recipes/$@/recipe.yaml seed=$(SEED) --overwrite

frozen-lake: ## a tiny model learns to cross frozen lakes: make the start model, then train
sokoban: ## a tiny model learns to push boxes: make the start model, then train
webshop: ## a tiny model learns to shop on a web site: make the start model, then train

long-context: $(VENV)/installed-dev ## a tiny model learns look-ups in texts of 8,000 tokens, divided over two ranks
	$(BIN)/python recipes/long-context/lookups.py runs/long-context-random
	$(BIN)/drumroll train recipes/long-context/warm-start.yaml seed=$(SEED) --overwrite
	$(BIN)/drumroll train recipes/long-context/recipe.yaml seed=$(SEED) --overwrite

chain: $(VENV)/installed ## the whole way: SFT, a reward model, PPO by it, distillation into a smaller model
	for stage in sft reward-model rlhf student student-sft; do \
		$(BIN)/drumroll train recipes/chain/$$stage.yaml seed=$(SEED) --overwrite || exit 1; done
	$(BIN)/drumroll runs runs/chain

multi-domain-smollm2: smollm2 system ## five domains at once for SmolLM2: teach its judge, then train
	$(BIN)/drumroll train recipes/multi-domain/judge-smollm2.yaml seed=$(SEED) --overwrite
	$(BIN)/drumroll train recipes/multi-domain/smollm2.yaml seed=$(SEED) --overwrite

frozen-lake-smollm2 sokoban-smollm2 webshop-smollm2: smollm2
	$(BIN)/drumroll train recipes/$(@:-smollm2=)/warm-start-smollm2.yaml seed=$(SEED) --overwrite
	$(BIN)/drumroll train recipes/$(@:-smollm2=)/smollm2.yaml seed=$(SEED) --overwrite

frozen-lake-smollm2: ## the same as frozen-lake for SmolLM2
sokoban-smollm2: ## the same as sokoban for SmolLM2
webshop-smollm2: ## the same as webshop for SmolLM2

bench: $(VENV)/installed ## run all benchmarks and write docs/performance.md (nothing else may run)
	$(BIN)/python benchmarks/collect.py

vllm: $(VENV)/installed-vllm ## install vLLM's CPU build (on GPUs: pip install vllm)

bench-env: peers .bench/vllm/installed ## install the peers that tests and benchmarks compare with, each in its own environment

peers: $(VENV)/installed-dev $(PEERS:%=.bench/%/installed)

.bench/trl/installed: benchmarks/peers/trl.txt
	$(PYTHON) -m venv .bench/trl
	.bench/trl/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/peers/trl.txt
	@touch $@

.bench/vllm/installed: benchmarks/peers/vllm.txt constraints.txt
	$(PYTHON) -m venv .bench/vllm
	.bench/vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch transformers
	.bench/vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --requirement $<
	@touch $@

.bench/ifeval/installed: benchmarks/peers/ifeval.txt
	$(PYTHON) -m venv .bench/ifeval
	.bench/ifeval/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement benchmarks/peers/ifeval.txt
	@touch $@

.bench/gem/installed .bench/lm-eval/installed .bench/trackio/installed: .bench/%/installed: benchmarks/peers/%.txt $(VENV)/installed-dev
	$(PYTHON) -m venv .bench/$*
	.bench/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(.bench/$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/ours.pth"
	@touch $@

.bench/openenv/installed .bench/inspect/installed: .bench/%/installed: benchmarks/peers/%.txt
	$(PYTHON) -m venv .bench/$*
	.bench/$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

system: ## system packages of the tests (Debian: a C compiler, chromium, bubblewrap, iproute2), where they are missing
	@command -v cc >/dev/null || ./tools/system-packages gcc libc6-dev
	@command -v chromium >/dev/null || ./tools/system-packages chromium
	@command -v bwrap >/dev/null || ./tools/system-packages bubblewrap
	@command -v tc >/dev/null || ./tools/system-packages iproute2

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV) || { ./tools/system-packages python3-venv && $(PYTHON) -m venv --clear $(VENV); }

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/installed-vllm: benchmarks/peers/vllm.txt $(VENV)/installed
	$(PIP) --no-deps --requirement $<
	@touch $@

$(VENV)/installed-slow: $(VENV)/installed-dev $(VENV)/installed-vllm
	$(PIP) 'ray[default]'
	@touch $@

clean: ## remove the virtual environment and caches (runs stay)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
