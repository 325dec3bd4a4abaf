#!/bin/sh
# On a machine with an NVIDIA GPU, from the root of a checkout: install, run what needs a GPU, and measure.
#
#     OUT=results sh benchmarks/gpu.sh
#
# Leaves in OUT: machine.txt, tests.txt, memcheck.txt and gpu_step.jsonl, which belongs under benchmarks/results/.
set -u
OUT=${OUT:-.}
mkdir -p "$OUT"
python -m pip install --no-deps --no-build-isolation -q -e . || exit 1
{
    nvidia-smi
    nvidia-smi topo -m
    python -c "import sys, torch; print(sys.version, torch.__version__, torch.version.cuda)"
    ulimit -l
    date -u
} > "$OUT/machine.txt" 2>&1
timeout 240 python -m pytest -m gpu -q -ra > "$OUT/tests.txt" 2>&1
tail -15 "$OUT/tests.txt"
if command -v compute-sanitizer > /dev/null; then
    timeout 120 compute-sanitizer --tool memcheck python -m pytest -m gpu -q tests/runtime/optim/test_kernels.py \
        > "$OUT/memcheck.txt" 2>&1
    tail -3 "$OUT/memcheck.txt"
fi
timeout "${SECONDS_LEFT:-1200}" python -m benchmarks.gpu_step --json "$OUT/gpu_step.jsonl" "$@"
