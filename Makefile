# Every target sets up what it needs: a virtual environment with the pinned dependencies and a
# release build of the extension, with the emulated GPU that the tests use. A second call finds both
# ready and starts at once.

PYTHON ?= python3
ARGS   ?=

VENV := .venv
PY   := $(VENV)/bin/python
DEPS := $(VENV)/.deps-installed
EXT  := $(VENV)/.extension-built

ISSUE_FORMS    := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
CUDA_SOURCES   := $(shell find kernels tests/emulator -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find src kernels -type f 2>/dev/null)

# One thread and one compile job per test worker: the workers themselves fill the cores.
# Inductor would compile and run a program for each set of vectors before it believes that they work. A hundred tests start
# Python, which compiles the package each time where it may not write what it compiled.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help setup demo results test test-slow test-all durations test-simd test-rust test-newest test-tch check-tch tsan soak crashtest wheels check-wheel check format bench bench-gpu sanitize audit docs lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(EXT) ## virtual environment, dependencies, release build

demo: $(EXT) ## train the additive baseline and DDL on the embedded text, compare, sample
	$(PY) -m ddl demo $(ARGS)

PYTEST := $(TEST_ENV) $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal

test: $(EXT) ## the fast Python tests, and one slow one of each file (ARGS="-k rewrite" to choose)
	$(PYTEST) --tier fast $(ARGS)

test-slow: $(EXT) ## the other Python tests, large tables sampled
	$(PYTEST) --tier slow $(ARGS)

test-all: $(EXT) ## the Python tests, every case of every table
	$(PYTEST) --all $(ARGS)

durations: $(EXT) ## run both tiers on a quiet machine, and record what is slow in tests/durations.json
	$(PYTEST) --record-durations
	$(PYTEST) --tier fast --record-durations

# Instructions of another width add sums in another order, in our kernels and in torch's. Inductor's cache does not know the
# width: from one of AVX-512, kernels return wrong numbers, or end the process.
AVX2 := TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor-avx2 DDL_SIMD=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
PORTABLE := DDL_SIMD=portable
SIMD_SAMPLE := tests/nn/test_stream.py tests/hf/test_model.py tests/paper/test_paper.py tests/models/streams/test_transformers.py \
    tests/lab/evaluation/test_eval.py::test_the_likeliest_ending_is_greedy

test-simd: $(EXT) ## a sample of the tests with AVX2 alone, then without SIMD code of ours (ARGS=tests for all)
	$(AVX2) $(PYTEST) $(or $(ARGS),$(SIMD_SAMPLE))
	$(PORTABLE) $(PYTEST) $(or $(ARGS),$(SIMD_SAMPLE))

# No released PEFT works with it, so it is not in the lock: this folder hides the pinned transformers from the tests of caches and files.
NEWEST := transformers==5.24.0
NEWEST_TESTS := $(addprefix tests/hf/,test_model.py test_generation.py test_packing.py test_saving.py decoders/test_generation.py)

build/$(NEWEST): | $(DEPS)
	@$(PY) -m pip install --disable-pip-version-check --quiet --no-compile --no-deps --target $@ $(NEWEST) || \
	    { rm -rf $@; echo "$(NEWEST) could not be installed; this needs the package registry."; exit 1; }

test-newest: $(EXT) build/$(NEWEST) ## tests of Hugging Face's classes with the newest transformers
	PYTHONPATH="$(CURDIR)/build/$(NEWEST)" $(PYTEST) $(or $(ARGS),$(NEWEST_TESTS))

# The test binary embeds Python instead of being loaded by it, so it needs libpython.
# Without optimisation it builds in a quarter of the time, and integers that overflow panic.
LIBPYTHON = import os, sys, sysconfig; get = sysconfig.get_config_var; path = os.path.join(get("LIBDIR"), get("LDLIBRARY")); \
    print(get("LIBDIR")) if os.path.exists(path) else sys.exit("The Rust tests link Python, but %s is missing. Install python3-dev." % path)

WITH_LIBPYTHON = libdir=$$($(PY) -c '$(LIBPYTHON)') && \
    export LD_LIBRARY_PATH="$$libdir$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" PYO3_PYTHON="$(CURDIR)/$(PY)"

TORCH_LIB = import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "lib"))

test-rust: $(DEPS) ## the Rust tests, the crate without Python, its documentation
	@$(WITH_LIBPYTHON) && cargo test $(ARGS)
	cargo run --quiet --no-default-features --example slices
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps --no-default-features

# A race is seen only in code that was compiled for it, Rust's standard library included: that takes a nightly with `rust-src`.
# Allocations that must fail are among the tests.
tsan: export TSAN_OPTIONS := allocator_may_return_null=1 $(TSAN_OPTIONS)
tsan: $(DEPS) ## the Rust tests with threads under ThreadSanitizer (needs a nightly Rust with rust-src)
	@rustup run nightly rustc --version >/dev/null 2>&1 && \
	test -d "$$(rustup run nightly rustc --print sysroot)/lib/rustlib/src/rust/library" || { \
	    echo "ThreadSanitizer needs a nightly Rust with its sources: rustup toolchain install nightly --component rust-src"; exit 1; }
	@$(WITH_LIBPYTHON) && RUSTFLAGS=-Zsanitizer=thread CARGO_TARGET_DIR=target/tsan rustup run nightly cargo test -Zbuild-std --target "$$(rustc --print host-tuple)" \
	    --lib --test slices --test threads -- thread at_once $(ARGS)

# The crate tch takes the libtorch of the environment. Most of the time goes into compiling its bindings.
WITH_LIBTORCH = export PATH="$(CURDIR)/$(VENV)/bin:$$PATH" LIBTORCH_USE_PYTORCH=1 OMP_NUM_THREADS=1 && \
    export LD_LIBRARY_PATH="$$($(PY) -c '$(TORCH_LIB)')$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}"
TCH := --no-default-features --features tch

test-tch: $(DEPS) ## the Rust tests on libtorch's tensors (the crate's feature tch)
	@$(WITH_LIBTORCH) && cargo test $(TCH) --test tch --test train $(ARGS) && \
	cargo run --quiet $(TCH) --example train -- README.md 20

check-tch: $(DEPS) ## lints and documentation of that feature
	@$(WITH_LIBTORCH) && cargo clippy $(TCH) --all-targets -- -D warnings && \
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps $(TCH)

# On a GPU the comparison takes twenty minutes with 16 processes, on a core two days. What has a record is kept.
PROCESSES ?= 1

results: $(EXT) ## docs/results.md, recall.md, transfer.md and decoders.md anew: corpus, all runs, tables, pictures (PROCESSES=16 on a GPU)
	test -e study/corpus.jsonl || $(PY) study/corpus.py study/corpus.jsonl $(ARGS)
	test -e study/data || $(PY) -m ddl prepare study/corpus.jsonl --out study/data --tokenizer bytes --validation 0.05
	export OMP_NUM_THREADS=1; \
	$(PY) -m study.side_by_side tuning main depth equal-flops equal-seconds smaller cpu --processes $(PROCESSES) || exit; \
	for kind in ours l2 rms; do $(PY) -m study.normalisation $$kind --processes $(PROCESSES) || exit; done; \
	for task in time depth; do $(PY) -m study.recall $$task --processes $(PROCESSES) || exit; done
	OMP_NUM_THREADS=1 $(PY) -m study.transfer --processes $(PROCESSES)
	$(PY) -m study.cost
	$(PY) -m study.again
	$(PY) -m study.page
	$(PY) -m study.recall_page
	$(PY) -m study.transfer_page
	$(PY) -m study.finetune
	$(PY) -m study.finetune --page

# It changes the number of threads all the time, and threads that wait would spin.
soak: $(EXT) ## 10,000 random problems against the reference (ARGS="--seed 3 --problems 50000")
	OMP_WAIT_POLICY=passive $(PY) -m tests.soak $(ARGS)

check: $(DEPS) ## formatting, lints and types, changing nothing
	cargo fmt --check
	PYO3_PYTHON="$(CURDIR)/$(PY)" cargo clippy --all-targets --features emulator -- -D warnings
	cargo clippy --no-default-features --lib --example slices --test slices -- -D warnings
	$(VENV)/bin/clang-format --dry-run --Werror $(CUDA_SOURCES)
	$(VENV)/bin/zizmor --quiet --offline --strict-collection --persona auditor .github
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(ISSUE_FORMS)
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(VENV)/bin/pre-commit validate-config
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as lint; lint()"

crashtest: $(EXT) ## kill training 200 times and resume it (ARGS="--kills 1000 --seed 3")
	@for run in "" "--kills 40 --processes 2" "--kills 40 --processes 2 --parallel fsdp2"; do \
	    folder=$$(mktemp -d) && { OMP_NUM_THREADS=1 $(PY) -m tests.lab.train.crash --folder $$folder $$run $(ARGS); \
	    status=$$?; rm -rf $$folder; [ $$status = 0 ] || exit $$status; }; done

wheels: $(DEPS) ## wheels for Linux (x86-64, aarch64) and sdist, into dist/ (TARGETS=x86_64 for one)
	$(PY) release/wheels.py $(if $(TARGETS),--targets $(TARGETS))

# Without ARGS: every pair of the support matrix, then two builds and the sdist: an hour or more.
check-wheel: $(DEPS) ## this machine's wheel of dist/ in empty environments (ARGS=--installed for one)
	$(PY) release/check_wheel.py $(ARGS)
	$(if $(ARGS),,$(PY) release/check_builds.py)

format: $(DEPS) ## format Rust, CUDA and Python in place
	cargo fmt
	$(VENV)/bin/clang-format -i $(CUDA_SOURCES)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(EXT) ## training steps, operators, generation and memory on the CPU
	$(PY) benchmarks/train_step.py
	$(PY) benchmarks/ops.py
	$(PY) benchmarks/decode.py
	$(PY) benchmarks/memory.py
	$(PY) benchmarks/streams.py
	$(PY) benchmarks/delta_rule.py
	$(PY) benchmarks/accelerated.py

bench-gpu: $(EXT) ## everything on a GPU, in two calls of 9 and 4 minutes (ARGS="--out FOLDER")
	@failed=0; for call in day tests; do benchmarks/gpu/day.sh $$call $(ARGS) || failed=1; done; exit $$failed

sanitize: $(EXT) ## part of the GPU tests under NVIDIA's compute-sanitizer
	$(PY) tests/gpu/sanitize.py $(ARGS)

audit: $(DEPS) ## licences and sources of crates, and with a network known weaknesses (needs cargo-deny, pip-audit)
	cargo deny --offline --all-features check bans licenses sources
	pip-audit --requirement requirements-dev.lock --disable-pip --no-deps

docs: $(EXT) ## the documentation's pages and the site of them, in site/
	PYTHONPATH=. $(PY) -m docs.scripts.performance
	PYTHONPATH=. $(PY) -m docs.scripts.pictures
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

lock: $(DEPS) ## rewrite requirements-dev.lock from pyproject.toml
	$(PY) -m uv pip compile --quiet --universal --python-version 3.10 \
	    --extra train --extra explore --extra report --extra plot --extra hf --extra eval --extra dev \
	    --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --output-file requirements-dev.lock pyproject.toml

clean: ## remove the environment, the builds and the caches; runs/ stays
	rm -rf $(VENV) target build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f python/ddl/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

need_cargo = @command -v cargo >/dev/null || { echo "ddl-rs is built with Rust, but \`cargo\` was not found. Install Rust (rustup) and try again."; exit 1; }

$(DEPS): requirements-dev.lock
	@command -v $(PYTHON) >/dev/null || { echo "ddl-rs needs Python 3.10 or newer, but \`$(PYTHON)\` was not found."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ddl-rs needs Python 3.10 or newer, but `$(PYTHON)` is %s. Name another one: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	$(need_cargo)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing the pinned dependencies into $(VENV); torch is large, this takes a minute or so."
	@$(PY) -m pip install --disable-pip-version-check --quiet "$$(grep -o '^uv==[^ ]*' requirements-dev.lock)"
	@$(PY) -m uv pip install --quiet --system-certs --compile-bytecode --python $(PY) -r requirements-dev.lock || \
	    $(PY) -m pip install --disable-pip-version-check --quiet -r requirements-dev.lock
	@touch $@

$(EXT): $(DEPS) $(NATIVE_SOURCES)
	$(need_cargo)
	@echo "Building the extension (release)."
	@env -u CONDA_PREFIX VIRTUAL_ENV="$(CURDIR)/$(VENV)" PIP_QUIET=1 MATURIN_NO_MISSING_BUILD_BACKEND_WARNING=1 \
	    $(PY) -m maturin develop --release --locked \
	    --features extension-module,emulator
	@touch $@
