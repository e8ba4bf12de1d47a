#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The operators on a GPU: build for this chip, run the tests, run compute-sanitizer over small cases, and plant an
# error to see that it is caught. Prints one line a check at the end; exits non-zero if any failed.
#
#   kernels/check_on_gpu.sh [build] [tests] [sanitize] [planted]      default: all four
#
# Needs a CUDA build of torch (2.11 or later), nvcc, pytest and hypothesis. Where vLLM is on PYTHONPATH its writer's
# bytes are compared too. OUT=<folder> keeps the logs.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} NWOR_CUDA=1 PYTHONUNBUFFERED=1
export NWOR_CUDA_ARCHS=${NWOR_CUDA_ARCHS:-90}
LOGS=${OUT:-$(mktemp -d)}
STEPS=${*:-build tests sanitize planted}
SMALL='replays or does_not_see or current_stream or overflow or counts_are_rows or one_count or mixed_batch or no_sense
       or restore_undoes or outlives_its_step or bound_step'
SMALL=${SMALL//$'\n'/ }
declare -a SUMMARY
FAILED=0

check() { # name, seconds, command...
    local name=$1 limit=$2 start=$SECONDS rc
    shift 2
    timeout "$limit" bash -c '"$@"' _ "$@" >"$LOGS/$name.log" 2>&1
    rc=$?
    SUMMARY+=("$(printf '%-18s rc %-4s %4d s  %s' "$name" "$rc" $((SECONDS - start)) \
        "$(grep -aE 'passed|failed|no tests|ERROR SUMMARY|RACECHECK SUMMARY|\*\*\* nwor' "$LOGS/$name.log" | tail -2 | tr '\n' ' ')")")
    [ "$rc" -eq 0 ] || { FAILED=1; echo "--- $name"; grep -aE '^(E  |FAILED|ERROR|=========)|rror:' "$LOGS/$name.log" | head -30; tail -5 "$LOGS/$name.log"; }
    return $rc
}

build() { python3 setup.py -q build_ext --inplace; }

small_cases() { # sanitizer arguments...
    compute-sanitizer --error-exitcode 99 --target-processes all "$@" \
        python3 -m pytest -q -x -p no:cacheprovider -m gpu -k "$SMALL" \
        tests/kernels/test_ops.py tests/kernels/test_ops_step.py tests/kernels/test_ops_cuda.py
}

planted() { # Without its guard, a slot beyond the cache is written: memcheck has to say so.
    local copy
    copy=$(mktemp -d)
    cp -r kernels nwor nwor_lab tests setup.py pyproject.toml "$copy"
    cd "$copy" && rm -f nwor/_C.*so
    sed -i 's/if (!a.accepted_mask\[t\] || !a.key_cache.holds(slot)) return;/if (!a.accepted_mask[t]) return;/' kernels/cuda/per_layer.cu
    PYTHONPATH=$copy:$PYTHONPATH python3 setup.py -q build_ext --inplace || return 1
    PYTHONPATH=$copy:$PYTHONPATH compute-sanitizer --error-exitcode 99 --tool memcheck \
        python3 -m pytest -q -x -p no:cacheprovider -m gpu -k does_not_see tests/kernels/test_ops_cuda.py | tee planted.log
    grep -q 'Invalid __global__ write' planted.log && grep -q commit_draft_rows planted.log && echo "planted error caught: passed"
}

export SMALL
export -f build small_cases planted

for step in $STEPS; do
    case $step in
    build) check build 300 build || exit 1 ;;
    tests)
        check tests 600 python3 -m pytest -q -p no:cacheprovider -n 6 -m gpu tests/kernels/test_ops*.py
        ;;
    sanitize)
        for tool in memcheck racecheck initcheck synccheck; do check "$tool" 200 small_cases --tool "$tool"; done
        ;;
    planted) check planted 240 planted ;;
    *) echo "unknown step $step: build, tests, sanitize, planted" >&2; exit 2 ;;
    esac
done

echo "=== $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1), $(python3 -c 'import torch; print("torch", torch.__version__)'), logs in $LOGS"
printf '%s\n' "${SUMMARY[@]}"
exit $FAILED
