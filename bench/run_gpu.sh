#!/bin/sh
# Everything that needs a GPU, on one machine and in order of importance: install offline, test, measure.
#
#   bench/run_gpu.sh BUNDLE [PART...]
#
# BUNDLE: a folder made by `install.sh --bundle` where there was a registry, or a .tar, .tar.gz or .tar.zst of one, which
# is unpacked under PHOS_UNPACK (default /opt/phos-bundle); `-` if PhOS is on the PATH already.
# PARTs: install doctor tests answers cow dump32 correctness cow-correctness frameworks libraries steady dump8 toggle cow-variants
# audit dump64 restore32 restore8 restore64 restore-order serverless lazy-correctness (default: all, in this order); cow8
# cow32 cow64: one size of `cow`, without the peer; cow-expandable: two, in expandable segments; soak: what grows with
# checkpoints and restores; disk32: of dump32 only the disk, without the peer; launches, memory, training: one part of
# steady; jobs: JAX, DataLoader's workers, NVML, shared tensors; copy-load, page-lock, driver-calls, driver-sharing,
# ungated: what a decision of ours rests on; trace-cow64 trace-restore8 trace-restore32: when each piece was copied,
# tables of which go to the logs and nothing to the results;
# gpus, gpu-pairs: tests that need two GPUs, and what the driver does with lists of them; pytorch-jobs: loaders however workers are started, and torchrun; samples: NVIDIA's CUDA
# samples, of which there is a checkout in the folder PHOS_CUDA_SAMPLES.
#
# Each part has its own time limit and ends with a line `PART name: ...`; parts that do not fit into PHOS_GPU_SECONDS
# (default 530) any more are named and left for another call. Results go to bench/results, and with the logs as one
# archive to $OUT, if that is set. PHOS_BENCH_PYTHON is the Python that has PyTorch (default python3).
set -u
cd "$(dirname "$0")/.." || exit 1

bundle=${1:?usage: bench/run_gpu.sh BUNDLE|- [PART...]}
shift
[ $# -gt 0 ] || set -- install doctor tests answers cow dump32 correctness cow-correctness \
    frameworks libraries steady dump8 toggle cow-variants audit dump64 restore32 restore8 restore64 restore-order serverless lazy-correctness

start=$(date +%s)
total=${PHOS_GPU_SECONDS:-530}
python=${PHOS_BENCH_PYTHON:-python3} # the one that has PyTorch
results=bench/results
logs=${PHOS_GPU_LOGS:-/tmp/phos-gpu-logs}
out=${OUT:-}
unset OUT
export PYTHONUNBUFFERED=1
mkdir -p "$results" "$logs"
status=0
left_out=

# Everything started from here carries this mark in its environment, through any daemonising, so that a part that was
# stopped leaves nothing behind that keeps GPU memory.
export PHOS_GPU_RUN=$$.$start
sweep() {
    for environment in /proc/[0-9]*/environ; do
        pid=${environment#/proc/}
        pid=${pid%/environ}
        [ "$pid" = $$ ] || ! grep -qz "^PHOS_GPU_RUN=$PHOS_GPU_RUN\$" "$environment" 2>/dev/null || kill -9 "$pid"
    done 2>/dev/null
}

# CRIU keeps what it has found out about the kernel in /run, if that is a tmpfs, as under systemd; else it finds it out
# again whenever it starts.
[ "$(stat -f -c %T /run)" = tmpfs ] || mount -t tmpfs tmpfs /run || echo "run_gpu.sh: /run is no tmpfs" >&2

# One archive, renewed after each part: what was measured survives whatever ends this script.
collect() {
    [ -z "$out" ] || tar -czf "$out/phos-gpu-results.tar.gz" -C "$PWD" "$results" -C "$(dirname "$logs")" "$(basename "$logs")"
}

left() { echo $((total - $(date +%s) + start)); }

# part NAME SECONDS COMMAND...: run with a time limit, log to a file, and show the end of the log.
part() {
    name=$1 limit=$2
    shift 2
    now=$(left)
    # Less than a third of the time it may need would only produce a failure.
    if [ "$now" -lt $((limit / 3)) ]; then
        left_out="$left_out $name"
        return 0
    fi
    [ "$now" -ge "$limit" ] || limit=$now
    began=$(date +%s)
    echo "=== $name (at most $limit s)"
    timeout --kill-after=15 "$limit" "$@" >"$logs/$name.log" 2>&1
    code=$?
    sweep
    # phosd's own has what the tables leave out: how long mapping took of an attach, for one.
    [ ! -f /run/phos/phosd.log ] || mv /run/phos/phosd.log "$logs/$name.phosd.log"
    collect
    tail -n "${PHOS_GPU_TAIL:-60}" "$logs/$name.log"
    case $code in
    0) word=passed ;;
    124 | 137) word="stopped at its time limit" status=1 ;;
    *) word="failed with status $code" status=1 ;;
    esac
    echo "PART $name: $word, $(($(date +%s) - began)) s"
    return "$code"
}

# A bundle is set up where it lies, so an archive is unpacked to a place that stays.
case $bundle in
-) ;;
*.tar | *.tar.gz | *.tgz | *.tar.zst)
    unpack=${PHOS_UNPACK:-/opt/phos-bundle}
    if [ ! -e "$unpack/unpacked" ]; then
        mkdir -p "$unpack" && tar -C "$unpack" -xf "$bundle" || exit 1
        touch "$unpack/unpacked"
    fi
    installer=$(find "$unpack" -path '*/lib/phos/install.sh' | head -n 1)
    ;;
*) installer=$(readlink -f "$bundle/lib/phos/install.sh") ;;
esac
if [ "$bundle" != - ]; then
    [ -f "${installer:-}" ] || { echo "run_gpu.sh: $bundle holds no lib/phos/install.sh: not a bundle" >&2; exit 1; }
    PATH=${installer%/lib/phos/install.sh}/bin:$PATH
    export PATH
fi

# The budget of a benchmark: what is left, less the time to finish what it has begun.
measure() {
    name=$1 seconds=$2 script=$3
    shift 3
    budget=$(($(left) - 40))
    [ "$budget" -lt "$seconds" ] || budget=$seconds
    part "$name" $((seconds + 40)) "$python" "bench/$script.py" --budget "$budget" "$@"
}

# The Python that has PhOS itself, for what measures a part of it without phosd.
own_python() {
    command=$(readlink -f "$(command -v phos-gpu)") && echo "${command%/bin/phos-gpu}/venv/bin/python"
}

# traced NAME SECONDS SCRIPT...: as measure, with phosd's traces of copies; they and their tables go to the logs.
traced() {
    PHOS_TRACE_COPIES=$logs/$1
    mkdir -p "$PHOS_TRACE_COPIES"
    export PHOS_TRACE_COPIES
    measure "$@" --results "$logs"
    # Where it is left out, or has failed, there may be none.
    if [ "$(echo "$PHOS_TRACE_COPIES"/*.json)" != "$PHOS_TRACE_COPIES/*.json" ]; then
        "$python" bench/copy_trace.py "$PHOS_TRACE_COPIES"/*.json >"$PHOS_TRACE_COPIES.md" || status=1
    fi
    unset PHOS_TRACE_COPIES
    collect
}

# gpu_tests NAME SECONDS FILE...; PHOS_GPU_TESTS may hold more of pytest's arguments, such as `-k graph`.
gpu_tests() {
    name=$1 seconds=$2
    shift 2
    # shellcheck disable=SC2086  # several words
    part "$name" "$seconds" "$python" -m pytest "$@" -v --tb=short --durations=0 -p no:cacheprovider ${PHOS_GPU_TESTS:-}
}

for wanted in "$@"; do
    case $wanted in
    install)
        # Nothing after it makes sense without it.
        [ "$bundle" = - ] || part install 180 "$installer" --offline --python "${PHOS_PYTHON:-$python}" || exit 1
        ;;
    doctor) part doctor 60 phos-gpu doctor ;;
    tests) gpu_tests tests 400 tests/gpu/test_examples.py tests/gpu/test_lifecycle.py tests/gpu/test_concurrent.py ;;
    answers) gpu_tests answers 300 tests/gpu/test_driver_answers.py ;;
    gpus) gpu_tests gpus 900 tests/gpu/test_other_gpu.py tests/gpu/test_several_gpus.py ;;
    frameworks) gpu_tests frameworks 560 tests/gpu/test_frameworks.py ;;
    libraries) gpu_tests libraries 400 tests/gpu/test_libraries.py ;;
    pytorch-jobs) gpu_tests pytorch-jobs 540 tests/gpu/test_pytorch_jobs.py ;;
    dump8) measure dump8 150 dump_restore --sizes 8 ;;
    dump32) measure dump32 400 dump_restore --sizes 32 --disk-gib 30 ;;
    disk32) measure disk32 260 dump_restore --sizes 32 --places disk --systems phos --repeats 2 --disk-gib 20 ;;
    dump64) measure dump64 300 dump_restore --sizes 64 --repeats 1 ;;
    launches) measure launches 60 steady_state --only launches ;;
    memory) measure memory 100 steady_state --only memory ;;
    training) measure training 240 steady_state --only training ;;
    steady) measure steady 330 steady_state ;;
    correctness) measure correctness 420 correctness ;;
    toggle) measure toggle 150 toggle ;;
    jobs) measure jobs 200 jobs ;;
    cow) measure cow 420 cow ;;
    cow8) measure cow8 100 cow --sizes 8 --systems cow,stop ;;
    cow32) measure cow32 150 cow --sizes 32 --systems cow,stop ;;
    cow64) measure cow64 200 cow --sizes 64 --systems cow,stop ;;
    cow-expandable) measure cow-expandable 280 cow --expandable --sizes 64,8 --systems cow,stop ;;
    trace-cow64) traced trace-cow64 120 cow --sizes 64 --systems cow --repeats 2 --no-restore ;;
    trace-restore8) traced trace-restore8 120 restore --sizes 8 --repeats 2 --systems "eager;lazy;lazy, pinned" ;;
    trace-restore32) traced trace-restore32 200 restore --sizes 32 --repeats 1 --systems "eager;lazy;lazy, pinned;pool" ;;
    copy-load) measure copy-load 120 copy_load ;;
    driver-calls) measure driver-calls 60 driver_calls ;;
    driver-sharing) measure driver-sharing 60 driver_sharing ;;
    gpu-pairs) measure gpu-pairs 120 gpu_pairs ;;
    ungated) measure ungated 60 ungated ;;
    page-lock)
        theirs=$python
        python=$(own_python) && measure page-lock 60 page_lock --gib 8 --repeats 1 || status=1
        python=$theirs
        ;;
    cow-variants) measure cow-variants 420 cow --sections pools,validate,phases,transfers ;;
    audit) measure audit 240 audit ;;
    restore8) measure restore8 200 restore --sizes 8 ;;
    restore32) measure restore32 400 restore --sizes 32 ;;
    restore64) measure restore64 400 restore --sizes 64 --repeats 2 ;;
    restore-order)
        measure restore-order 200 restore --sizes 32 --models 4 \
            --systems "lazy, random order;lazy;lazy, fast;pool, allocation order;pool, random order;pool"
        ;;
    serverless) measure serverless 300 serverless ;;
    lazy-correctness) measure lazy-correctness 420 lazy_correctness ;;
    cow-correctness) measure cow-correctness 480 cow_correctness ;;
    soak) measure soak 500 soak --seconds 90 ;;
    samples) measure samples 500 unmodified --samples "${PHOS_CUDA_SAMPLES:?the folder of a checkout}" ;;
    *)
        echo "run_gpu.sh: there is no part named $wanted" >&2
        exit 2
        ;;
    esac
done

[ -z "$left_out" ] || echo "No time left for:$left_out. Call again: $0 -$left_out"
exit "$status"
