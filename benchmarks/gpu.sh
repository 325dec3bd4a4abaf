#!/bin/sh
# On a machine with an NVIDIA GPU, from the root of a checkout: run what needs a GPU, and measure. Needs no network.
#
#     OUT=results sh benchmarks/gpu.sh                 # all steps
#     OUT=results sh benchmarks/gpu.sh machine tests   # some of them
#
# Steps: machine, tests, parity, ranks, memcheck, step. Each ends after LIMIT seconds (540), and leaves machine.txt, tests.txt,
# parity.txt, ranks.txt, memcheck.txt or gpu_step.jsonl in OUT; the last belongs under benchmarks/results/. What a step leaves is
# not measured again: gpu_step goes on after the last line of its file.
set -u
OUT=${OUT:-.}
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-540}
WORKERS=${WORKERS:-8}
export CUBLAS_WORKSPACE_CONFIG=:4096:8
mkdir -p "$OUT"
$PYTHON -m pip install --no-deps --no-build-isolation -q -e . || exit 1

# The folders are named: other tests need packages that such a machine may not have.
run_tests() { # FILE ARGUMENTS..
    file=$1
    shift
    timeout -s INT -k 15 "$LIMIT" $PYTHON -m pytest -q -ra -n "$WORKERS" --dist worksteal --tb=short "$@" > "$file" 2>&1
    tail -3 "$file"
}

for step in ${*:-machine tests parity ranks memcheck step}; do
    case $step in
    machine)
        {
            nvidia-smi
            nvidia-smi topo -m
            $PYTHON -c "import sys, torch; print(sys.version, torch.__version__, torch.version.cuda)"
            nproc
            free -g
            ulimit -l
            date -u
        } > "$OUT/machine.txt" 2>&1
        ;;
    tests) run_tests "$OUT/tests.txt" tests/gpu tests/runtime/storage/test_state_kernels.py ;;
    parity)
        ZINF_GPU=1 run_tests "$OUT/parity.txt" tests/parity/test_models.py tests/parity/test_by_default.py \
            tests/parity/test_recurrent.py
        ;;
    ranks) WORKERS=0 run_tests "$OUT/ranks.txt" -m gpu tests/distributed/test_devices.py ;;
    memcheck)
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -s INT -k 15 "$LIMIT" compute-sanitizer --tool memcheck \
            $PYTHON -m pytest -m gpu -q tests/runtime/storage/test_state_kernels.py > "$OUT/memcheck.txt" 2>&1
        tail -3 "$OUT/memcheck.txt"
        ;;
    step) timeout -s INT -k 15 "$LIMIT" $PYTHON -m benchmarks.gpu_step --json "$OUT/gpu_step.jsonl" ;;
    *) echo "$step is none of: machine tests parity ranks memcheck step" >&2 && exit 2 ;;
    esac
done
