#!/usr/bin/env bash
# Checks and measures batchkit on this machine's GPU, without a network, in at most eight minutes on an H200:
#
#     benchmarks/gpu_check.sh [--json FILE] [--skip tests,decode,throughput] [--budget-s SECONDS]
#
# PYTHON          the interpreter, which has torch and transformers. Default: python3
# XFORMERS_WHEEL  a wheel of xformers; it is installed for this run alone, without what it depends on
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
path=$here/src

if [ -n "${XFORMERS_WHEEL:-}" ]; then
    added=$(mktemp -d)
    trap 'rm -rf "$added"' EXIT
    if "$python" -m pip install --quiet --no-deps --no-index --target "$added" "$XFORMERS_WHEEL"; then
        path=$path:$added
    else
        echo "$XFORMERS_WHEEL could not be installed; going on without it" >&2
    fi
fi

cd "$here" || exit 1
PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 "$python" benchmarks/gpu_check.py "$@"
