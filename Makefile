# make demo    trains the default agent from nothing: scout, clone, RL; the same command resumes it
# make check   ruff and the quick tests: no whole runs, and no files that import what trains, plays or
#              starts processes (LONG in tests/conftest.py); tests marked slow are left out, too
# make check-next  quick tests of tests/ops and tests/unit, and all tests of meshes, under Python 3.12
#              or 3.13, where jax is newer
# make test    every test but the long ones that rarely fail; what it compiles is kept in
#              .pytest_cache, and the next time is shorter
# make soak    those: killed processes, full disks, hostile files, a fake gcloud, whole benchmarks
# make cuda    installs what compiles for NVIDIA GPUs (2.4 GB, no GPU needed), which some of those want
# make tables  every table and curve of experiments/ again, from the metrics committed there
# make lint    ruff alone        make clean   removes the environments and caches, not runs/
# make chaos   kills runs of every kind at random moments and compares what they end with
# Needs Python 3.11+ and make. Choose another interpreter with `make demo PYTHON=/path/to/python`.

PYTHON ?= python3
VENV := .venv
WORKERS ?= 2
RUN := $(VENV)/bin/python
# Scripts in other folders can import the package. Requirements files hold its dependencies.
INSTALL_PACKAGE = $(RUN) -m pip install --disable-pip-version-check --no-deps -e .
DEMO = $(RUN) -m agentrl_jax.train --config=configs/demo_scout.py --workdir=runs/demo

PYTHON_NEXT ?= $(shell for python in python3.13 python3.12 \
  "$$(pyenv root 2>/dev/null)"/versions/3.1[32].*/bin/python3; do \
  "$$python" -c '' 2>/dev/null && { echo "$$python"; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help demo check check-next test soak cuda chaos test-reference test-openenv test-tunix harness-clients bench-tunix bench-scout tables lint clean python-version

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

# Ctrl-C is for the training, which saves and ends with 75; the shell waits for it.
demo: $(VENV)/run.stamp
	@trap : INT; echo '$(DEMO)'; $(DEMO); code=$$?; test $$code -ne 0 || cat experiments/demo/beside.txt; \
	  test $$code -ne 75 || \
	  echo 'make demo was stopped; make demo resumes it (make calls that an error)' >&2; exit $$code

# Workers of one thread each: on 2 cores this is faster than one worker whose XLA uses both, since
# compiling and tracing, which are most of the time, are serial. A file stays in one worker, for its
# fixtures; tests/conftest.py puts the longest files first. A worker that crashes ends the run: xdist
# would start another and then wait for it for ever.
PYTEST = OMP_NUM_THREADS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false $$XLA_FLAGS" \
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	--durations 10

QUICK = not trains and not slow and not soak

check: lint
	$(PYTEST) -m '$(QUICK)' $(ARGS)

# The environment has no torch, transformers or libtpu: tests that compare with them skip.
check-next: RUN := .venv-next/bin/python
check-next:
ifeq ($(PYTHON_NEXT),)
	@echo 'check-next: no Python 3.12 or 3.13 here; name one with PYTHON_NEXT=/path/to/python3.12'
else
	$(PYTHON_NEXT) -m venv .venv-next
	$(RUN) -m pip install --disable-pip-version-check -c requirements-test.txt \
	  -e '.[babyai,games,hosts,web]' hypothesis pytest pytest-xdist
	$(PYTEST) -m mesh $(ARGS)
	$(PYTEST) -m '$(QUICK)' tests/ops tests/unit $(ARGS)
endif

test: $(VENV)/test.stamp
	$(PYTEST) -m 'not soak' $(ARGS)

soak: $(VENV)/test.stamp
	$(PYTEST) -m soak $(ARGS)

cuda: $(VENV)/gpu.stamp

chaos: $(VENV)/test.stamp
	PYTHONPATH=.:tests $(RUN) tests/chaos.py $(ARGS)

tables: $(VENV)/run.stamp
	$(RUN) -m agentrl_jax.tables --rebuild experiments
	$(RUN) -m experiments.report

lint: $(VENV)/test.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# Environments of other libraries, whose pins contradict ours: so these go in without dependencies.
BASE_reference := requirements-test.txt
BASE_openenv := requirements-test.txt
BASE_tunix := requirements.txt
BASE_scout := requirements-test.txt
.venv-%/stamp: requirements/%.txt requirements.txt requirements-test.txt | python-version
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --disable-pip-version-check -r $(BASE_$*)
	.venv-$*/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	@touch $@

# Each imports the library first: without it the tests skip.
test-reference: .venv-reference/stamp
	.venv-reference/bin/python -c "import verl.trainer.ppo.core_algos"
	.venv-reference/bin/python -m pytest tests/parity/test_against_verl.py

test-openenv: .venv-openenv/stamp
	.venv-openenv/bin/python -c "import openenv.core.env_server.http_server"
	.venv-openenv/bin/python -m pytest tests/worlds/test_hosts_openenv.py

test-tunix: .venv-tunix/stamp
	.venv-tunix/bin/python -c "import benchmarks.peers.tunix_peer"
	.venv-tunix/bin/python -m pytest -W ignore tests/parity/test_against_tunix.py

bench-tunix: test-tunix
	.venv-tunix/bin/python -m benchmarks.peers.tunix $(ARGS)

bench-scout: .venv-scout/stamp
	.venv-scout/bin/python -m pytest -W ignore tests/reports/test_benchmarks.py -k scout
	.venv-scout/bin/python -m benchmarks.scout $(ARGS)

# Real clients as harnesses, in two more environments. Without them their tests skip.
AI_SDK := ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.92 @ai-sdk/anthropic@3.0.140
CODING_AGENTS := @anthropic-ai/claude-code@2.1.328 @openai/codex@0.169.0
harness-clients: | python-version
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --disable-pip-version-check -r requirements.txt \
	  -r requirements/harness.txt
	! command -v npm || npm install --no-save --prefix .venv-clients $(AI_SDK)
	! command -v npm || npm install --no-save --prefix .venv-clients $(AI_SDK) $(CODING_AGENTS) || \
	  echo 'Claude Code and Codex could not be installed: their tests skip'
	.venv-clients/bin/python -m pytest -W ignore tests/worlds/test_harness_clients.py \
	  tests/worlds/test_harness_endpoint.py
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --disable-pip-version-check -r requirements.txt \
	  -r requirements/verifiers.txt
	.venv-verifiers/bin/python -m pytest -W ignore tests/worlds/test_harness_clients.py -k verifiers

clean:
	rm -rf $(VENV) .venv-next .venv-reference .venv-openenv .venv-tunix .venv-scout .venv-clients
	rm -rf .venv-verifiers build *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis

# The stamps are newer than the files they were made from once an installation has finished.
$(VENV)/run.stamp: requirements.txt | python-version
	@echo 'Installing requirements.txt into $(VENV) (one to two minutes, once)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -r requirements.txt
	$(INSTALL_PACKAGE)
	@touch $@

$(VENV)/test.stamp: requirements-test.txt requirements.txt | python-version
	@echo 'Installing requirements-test.txt into $(VENV) (about 3 minutes, once)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -r requirements-test.txt
	$(INSTALL_PACKAGE)
	@touch $(VENV)/run.stamp $@

# Beside the packages of the environment, so that jax finds no plugin for CUDA unless asked to
$(VENV)/gpu.stamp: requirements/plan-gpu.txt | $(VENV)/test.stamp
	$(RUN) -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/gpu -r $<
	@touch $@

python-version:
	@command -v $(PYTHON) >/dev/null || { echo 'agentrl_jax needs Python 3.11 or newer; $(PYTHON)' \
	  'was not found. Install it, or name one: make demo PYTHON=/path/to/python3.11'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'agentrl_jax needs' \
	  'Python 3.11 or newer; $(PYTHON) is' "$$($(PYTHON) -V 2>&1)." \
	  'Name a newer one: make demo PYTHON=/path/to/python3.11'; exit 1; }
