# PhOS. `make help` lists the targets. install.sh calls `make build`; .ci/run calls `make check test`.
#
# Variables: BUILD (where outputs go), PYTHON, CC, CUDA_INCLUDE (folder of cuda.h), CRIU_INCLUDE (folder of
# criu-plugin.h), SANITIZE (for example address,undefined; give it a BUILD of its own), PYTEST_ARGS.

BUILD ?= build
CC := $(if $(filter default,$(origin CC)),gcc,$(CC))
PYTHON ?= $(or $(wildcard .prefix/lib/phos/venv/bin/python),$(wildcard .venv/bin/python),$(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python),python3)
CUDA_INCLUDE ?= build/cuda/include
CRIU_INCLUDE ?= $(firstword $(wildcard build/criu/include .prefix/lib/phos/criu/include) /usr/include/criu)
SANITIZE ?=
PYTEST_ARGS ?=

GEN := $(BUILD)/gen
comma := ,
export PYTHONPATH := $(CURDIR)
export PYTHONDONTWRITEBYTECODE := 1

# Stacks name lines. What a debugger wants besides (CFLAGS=-g) would take a third more of the compiler's time.
CFLAGS ?= -g1
# -fno-plt and friends are left alone: all three libraries live in other people's processes, so they are plain PIC with
# everything hidden that is not marked. -D_GNU_SOURCE is spelled as the sources spell it (empty), so both may be there.
ALL_CFLAGS := -std=gnu11 -O2 -Wall -Wextra -Werror -fvisibility=hidden -fPIC -pthread -MMD -MP -D_GNU_SOURCE= \
	-include packaging/portable.h -I$(GEN) $(CFLAGS) $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-omit-frame-pointer)
ALL_LDFLAGS := -shared -pthread -Wl,-z,relro,-z,now $(if $(SANITIZE),-fsanitize=$(SANITIZE),-Wl$(comma)-z$(comma)defs) $(LDFLAGS)
# Static, and hidden: an application may well use another version of protobuf-c itself.
PROTOBUF_C := -Wl,--exclude-libs,ALL -l:libprotobuf-c.a

PROTOS := $(wildcard proto/*.proto)
PROTO_PY := $(PROTOS:proto/%.proto=phos/gen/%_pb2.py)
WIRE := $(GEN)/wire.pb-c

FRONTEND_SRC := $(wildcard frontend/*.c)
SOFTGPU_SRC := $(wildcard softgpu/*.c)
CAN_FILL_SRC := $(wildcard criu_plugin/can_fill.c)
PLUGIN_SRC := $(filter-out $(CAN_FILL_SRC),$(wildcard criu_plugin/*.c))
LAZY_FILL_SRC := $(wildcard criu_plugin/lazy_fill/*.c)
CHUNKS_SRC := $(wildcard gpu_engine/copy_loop.c gpu_engine/fill_loop.c gpu_engine/fill_plan.c gpu_engine/save_loop.c gpu_engine/save_plan.c gpu_engine/page_copy.c gpu_engine/page_find.c gpu_engine/cow/chunk_table.c images/append.c images/chunk_hash.c)

# A folder whose sources do not exist (a partial checkout) is skipped.
FRONTEND := $(if $(FRONTEND_SRC),$(BUILD)/lib/libphos.so)
SOFTGPU := $(if $(SOFTGPU_SRC),$(BUILD)/softgpu/libcuda.so.1)
PLUGIN := $(if $(PLUGIN_SRC),$(BUILD)/plugin/phos_plugin.so) $(if $(LAZY_FILL_SRC),$(BUILD)/lib/phos_lazy_fill.so $(BUILD)/lib/phos-can-fill)
CHUNKS := $(if $(CHUNKS_SRC),$(BUILD)/lib/libphos_chunks.so)

# The two generators write what their folders' sources include: `SCRIPT --output FOLDER` fills FOLDER.
GEN_API := $(wildcard frontend/gen_api.py)
GEN_LIBRARY := $(wildcard frontend/gen_library.py)
GEN_STUBS := $(wildcard softgpu/gen_stubs.py)
GENERATED := $(if $(GEN_API),$(GEN)/api.stamp) $(if $(GEN_LIBRARY),$(GEN)/library.stamp) $(if $(GEN_STUBS),$(GEN)/stubs.stamp)

.PHONY: help build frontend softgpu plugin chunks gen sdk check lint fresh test test-gpu hostile bench docs clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDARY:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

build: frontend softgpu plugin chunks gen sdk ## everything native, and everything generated

frontend: $(FRONTEND) ## libphos.so, preloaded into applications
softgpu: $(SOFTGPU) ## the software GPU, a libcuda.so.1 for machines without one
plugin: $(PLUGIN) ## phos_plugin.so, loaded by CRIU, phos_lazy_fill.so, preloaded into `criu lazy-pages`, and phos-can-fill
chunks: $(CHUNKS) ## libphos_chunks.so, loaded by phosd and by whatever reads images

sdk: $(BUILD)/sdk/phos/__init__.py ## what programs import as phos

$(BUILD)/sdk/phos/__init__.py: phos/__init__.py
	@mkdir -p $(@D)
	cp $< $@

# ---- generated sources ----------------------------------------------------------------------------------------------

gen: $(PROTO_PY) $(WIRE).c $(GENERATED) ## protobuf code in C and Python, and what the list of driver entry points makes

$(WIRE).c: proto/wire.proto
	@mkdir -p $(@D)
	protoc-c --proto_path=proto --c_out=$(@D) $<
$(WIRE).h: $(WIRE).c ;

$(GEN)/%.desc: proto/%.proto
	@mkdir -p $(@D)
	protoc --proto_path=proto --descriptor_set_out=$@ $<

phos/gen/%_pb2.py: $(GEN)/%.desc packaging/gen_python.py
	"$(PYTHON)" packaging/gen_python.py $< $@

# Outputs that come out as before keep their time stamp, so that a change in one source does not rebuild all of them.
define generate
	@mkdir -p $(GEN)/new-$(@F)
	"$(PYTHON)" $(1) --output $(GEN)/new-$(@F)
	@for file in $(GEN)/new-$(@F)/*; do cmp -s $$file $(GEN)/$${file##*/} || cp $$file $(GEN)/; done
	@rm -r $(GEN)/new-$(@F)
	@touch $@
endef

$(GEN)/api.stamp: $(GEN_API) frontend/own_code.py frontend/cuda_api.def
	$(call generate,$(GEN_API))

$(GEN)/library.stamp: $(GEN_LIBRARY) frontend/library_api.def frontend/libphos.map
	$(call generate,$(GEN_LIBRARY))

# Which entry points are implemented is read from the sources.
$(GEN)/stubs.stamp: $(GEN_STUBS) frontend/cuda_api.def $(SOFTGPU_SRC) | $(filter %/api.stamp,$(GENERATED))
	$(call generate,$(GEN_STUBS))

# With a command: then make looks again what time stamp they have, and what includes them is compiled in the same run.
$(GEN)/phos_%: $(GENERATED) ; @:
$(GEN)/softgpu_%: $(GENERATED) ; @:

# ---- native code ----------------------------------------------------------------------------------------------------

OBJ := $(BUILD)/obj
FRONTEND_OBJ := $(FRONTEND_SRC:%.c=$(OBJ)/%.o)
SOFTGPU_OBJ := $(SOFTGPU_SRC:%.c=$(OBJ)/%.o)
LAZY_FILL_OBJ := $(LAZY_FILL_SRC:%.c=$(OBJ)/%.o)
CAN_FILL_OBJ := $(CAN_FILL_SRC:%.c=$(OBJ)/%.o) $(filter %/pagemap.o,$(LAZY_FILL_OBJ))
# The plugin fills memory as well, but is no `criu lazy-pages`.
PLUGIN_OBJ := $(PLUGIN_SRC:%.c=$(OBJ)/%.o) $(filter-out %/interpose.o %/keeper.o,$(LAZY_FILL_OBJ))
CHUNKS_OBJ := $(CHUNKS_SRC:%.c=$(OBJ)/%.o)
WIRE_OBJ := $(OBJ)/gen/wire.pb-c.o
ALL_OBJ := $(FRONTEND_OBJ) $(SOFTGPU_OBJ) $(PLUGIN_OBJ) $(LAZY_FILL_OBJ) $(CAN_FILL_OBJ) $(CHUNKS_OBJ) $(WIRE_OBJ)

$(OBJ)/frontend/%.o: frontend/%.c Makefile | $(WIRE).c $(GENERATED)
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -Ifrontend -isystem "$(CUDA_INCLUDE)" -c -o $@ $<

$(OBJ)/softgpu/%.o: softgpu/%.c Makefile | $(GENERATED)
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -Isoftgpu -isystem "$(CUDA_INCLUDE)" -c -o $@ $<

$(OBJ)/criu_plugin/%.o: criu_plugin/%.c Makefile | $(WIRE).c
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -Icriu_plugin -Iinclude -isystem "$(CRIU_INCLUDE)" -c -o $@ $<

$(CHUNKS_OBJ): $(OBJ)/%.o: %.c Makefile
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -Iinclude -c -o $@ $<

$(WIRE_OBJ): $(WIRE).c Makefile
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -Wno-unused-parameter -c -o $@ $<

# A version script beside the sources, where there is one, says what is exported under which version.
link_map = $(addprefix -Wl$(comma)--version-script=,$(wildcard $(1)))

$(BUILD)/lib/libphos.so: $(FRONTEND_OBJ) $(WIRE_OBJ) $(wildcard frontend/libphos.map)
	@mkdir -p $(@D)
	$(CC) $(ALL_LDFLAGS) -Wl,-soname,libphos.so $(call link_map,frontend/libphos.map) -o $@ \
		$(FRONTEND_OBJ) $(WIRE_OBJ) $(PROTOBUF_C) -ldl

$(BUILD)/softgpu/libcuda.so.1: $(SOFTGPU_OBJ) $(wildcard softgpu/libcuda.map)
	@mkdir -p $(@D)
	$(CC) $(ALL_LDFLAGS) -Wl,-soname,libcuda.so.1 $(call link_map,softgpu/libcuda.map) -o $@ \
		$(SOFTGPU_OBJ) -lm -ldl
	ln -sf libcuda.so.1 $(@D)/libcuda.so

# Not -z defs: the plugin calls functions that the criu binary exports.
$(BUILD)/plugin/phos_plugin.so: $(PLUGIN_OBJ) $(WIRE_OBJ)
	@mkdir -p $(@D)
	$(CC) $(filter-out -Wl$(comma)-z$(comma)defs,$(ALL_LDFLAGS)) -o $@ $(PLUGIN_OBJ) $(WIRE_OBJ) $(PROTOBUF_C)

# Not -z defs either: it logs by a function of criu's.
$(BUILD)/lib/phos_lazy_fill.so: $(LAZY_FILL_OBJ)
	@mkdir -p $(@D)
	$(CC) $(filter-out -Wl$(comma)-z$(comma)defs,$(ALL_LDFLAGS)) -o $@ $(LAZY_FILL_OBJ)

$(BUILD)/lib/phos-can-fill: $(CAN_FILL_OBJ)
	@mkdir -p $(@D)
	$(CC) $(filter-out -shared,$(ALL_LDFLAGS)) -o $@ $(CAN_FILL_OBJ)

$(BUILD)/lib/libphos_chunks.so: $(CHUNKS_OBJ)
	@mkdir -p $(@D)
	$(CC) $(ALL_LDFLAGS) -Wl,-soname,libphos_chunks.so -o $@ $(CHUNKS_OBJ)

-include $(ALL_OBJ:.o=.d)

# ---- checks ---------------------------------------------------------------------------------------------------------

check: build lint fresh ## build, lint, and see that what is generated is up to date

PY_SOURCES := $(wildcard phos/*.py cli gpu_engine images tests bench examples packaging frontend/*.py softgpu/*.py)

lint: gen ## ruff, its formatter, mypy, shell syntax
	"$(PYTHON)" -m ruff check $(PY_SOURCES)
	"$(PYTHON)" -m ruff format --check $(PY_SOURCES)
	"$(PYTHON)" -m mypy
	@for script in install.sh .ci/run .ci/alone $(wildcard packaging/* tests/machines/*); do \
		case "$$(head -c 64 $$script | head -n 1)" in *bash*) bash -n $$script;; *"/sh"*) sh -n $$script;; esac || exit 1; done

# Pages generated from sources are committed: making them again must change nothing.
fresh: gen
	$(if $(GEN_API),"$(PYTHON)" $(GEN_API) --check)
	$(if $(GEN_LIBRARY),"$(PYTHON)" $(GEN_LIBRARY) --check)

test: build ## everything that needs no GPU
	"$(PYTHON)" -m pytest tests/unit tests/integration tests/test_layering.py $(PYTEST_ARGS)

test-gpu: build ## the tests that need an NVIDIA GPU
	"$(PYTHON)" -m pytest tests/gpu $(PYTEST_ARGS)

hostile: build ## programs that misbehave under the frontend
	"$(PYTHON)" -m pytest tests/hostile $(PYTEST_ARGS)

bench: build ## measure; results go to bench/results
	"$(PYTHON)" -m phos.cli bench

docs: gen ## the pages that are generated from sources
	$(if $(GEN_API),"$(PYTHON)" $(GEN_API) --docs docs/driver-api.md)

clean: ## remove every output
	rm -rf $(BUILD) phos/gen
