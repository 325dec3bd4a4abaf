#!/bin/sh
# On a machine with an NVIDIA GPU, from the root of a checkout: run what needs a GPU, and measure. Needs no network.
#
#     OUT=results sh benchmarks/gpu.sh                 # all steps
#     OUT=results sh benchmarks/gpu.sh machine tests   # some of them
#
# It ends by itself after LIMIT seconds (540), with status 3 if there is more to do: run it again, and it goes on. What has run
# is not run again. Tests run in parts, and each part that has ended has a file. Delete that file to run it again, and say
# AGAIN=1 to measure once more what has failed. Steps, in this order, and what each leaves in OUT:
#
#     machine      machine.txt
#     tests        tests-1of3.txt .. tests of the GPU's own, with their kernels
#     parity       parity-1of6.txt .. tests of every bit, on the GPU
#     ranks        ranks-1of1.txt: two ranks on one GPU
#     step         gpu_step.jsonl, as are all measurements: what a step takes
#     aten         .. op by op, with few tokens and with many
#     segments     .. without expandable segments, within 10 GiB
#     profile      .. and traces/: one step under profilers
#     predicted    .. those cases of benchmarks/predictions.py that need no disk
#     sanitizer    sanitizer-1of3.txt ..: tests while torch looks for streams that race
#     memcheck     memcheck-kernels-1of1.txt, memcheck-training-1of4.txt ..: tests under compute-sanitizer
#
# gpu_step.jsonl belongs under benchmarks/results/.
set -u
OUT=${OUT:-.}
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-540}
WORKERS=${WORKERS:-8}
ALL="machine tests parity ranks step aten segments profile predicted sanitizer memcheck"
START=$(date +%s)
num_run=0
export CUBLAS_WORKSPACE_CONFIG=:4096:8
mkdir -p "$OUT"
$PYTHON -m pip install --no-deps --no-build-isolation -q -e . || exit 1

# End if there is too little time for anything.
check_time() {
    left=$((START + LIMIT - $(date +%s)))
    if [ $((20 * left)) -lt "$LIMIT" ]; then
        echo "$LIMIT seconds are over: run this again, and it goes on."
        exit 3
    fi
}

# Run a command for as long as there is time. Status 124 or 137: it was stopped.
limited() {
    num_run=$((num_run + 1))
    timeout -s INT -k 15 "$left" "$@"
}

# The folders are named: other tests need packages that such a machine may not have.
run_tests() { # NAME PARTS ARGUMENTS..
    name=$1
    parts=$2
    shift 2
    part=0
    while [ "$part" -lt "$parts" ]; do
        part=$((part + 1))
        file=$OUT/$name-${part}of$parts.txt
        [ -e "$file" ] && continue
        export ZINF_PART="$part/$parts"
        check_time
        limited ${UNDER:-} $PYTHON -m pytest -q -ra -n "$WORKERS" --dist worksteal --tb=short "$@" > "$file.begun" 2>&1
        status=$?
        echo "$name, part $part of $parts: $(tail -1 "$file.begun")"
        if [ $status -eq 124 ] || [ $status -eq 137 ]; then
            [ "$num_run" -gt 1 ] && check_time # it began late, and is run again
            echo "It was stopped after $left seconds." | tee -a "$file.begun"
        fi
        mv "$file.begun" "$file"
    done
}

measure() {
    check_time
    limited $PYTHON -m benchmarks.gpu_step --json "$OUT/gpu_step.jsonl" ${AGAIN:+--again} "$@"
    check_time
}

for step in ${*:-$ALL}; do
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
    tests) run_tests tests 3 tests/gpu tests/runtime/storage/test_state_kernels.py tests/runtime/storage/test_row_kernels.py ;;
    parity)
        ZINF_GPU=1 run_tests parity 6 tests/parity/test_models.py tests/parity/test_by_default.py \
            tests/parity/test_recurrent.py
        ;;
    ranks) WORKERS=0 run_tests ranks 1 -m gpu tests/distributed/test_devices.py ;;
    step) measure ;;
    aten)
        for tokens in 4096 65536; do
            measure --only 1.6B --tokens $tokens --compute aten --contestants memory zinf
        done
        ;;
    segments)
        PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False measure --only 1.6B --contestants zinf --device-memory 10GiB
        ;;
    profile) measure --only 1.6B --contestants zinf --profile "$OUT/traces" ;;
    predicted) # with the device memory of the preset h200; the model of 13 billion with more tokens needs a disk
        for case in "4096 1.5B 7B 13B" "16384 1.5B 7B 13B" "65536 1.5B 7B"; do
            measure --tokens ${case%% *} --only ${case#* } --contestants zinf --device-memory 141000000000 --rounds 3
        done
        ;;
    sanitizer) TORCH_CUDA_SANITIZER=1 run_tests sanitizer 3 tests/gpu ;;
    memcheck)
        check_time
        export PYTORCH_NO_CUDA_MEMORY_CACHING=1
        if limited compute-sanitizer --tool memcheck $PYTHON -c "import torch; torch.zeros(1, device='cuda').item()" \
            > "$OUT/memcheck.txt" 2>&1 && grep -q "ERROR SUMMARY" "$OUT/memcheck.txt"; then
            WORKERS=0
            UNDER="compute-sanitizer --tool memcheck"
            run_tests memcheck-kernels 1 -m gpu tests/runtime/storage/test_state_kernels.py tests/runtime/storage/test_row_kernels.py
            run_tests memcheck-training 4 tests/gpu -k "bitwise or codes or scaler"
            UNDER=
        else
            echo "compute-sanitizer does not run here:"
            tail -4 "$OUT/memcheck.txt"
        fi
        unset PYTORCH_NO_CUDA_MEMORY_CACHING
        ;;
    *) echo "$step is none of: $ALL" >&2 && exit 2 ;;
    esac
done
echo "Nothing is left to do."
