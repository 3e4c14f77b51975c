#!/usr/bin/env bash
# Checks and measures everything that one GPU allows, in one command and under nine minutes: builds, tests, checkers,
# microbenchmarks, steps of training, the decode benchmark. With --budget it instead pretrains a model, scores it and
# measures its speed (docs/gpu.md).
#
#   scripts/gpu_check.sh [FOLDER] [--stages a,b] [--seconds N] [--wheels FOLDER] [--dry-run]
#   scripts/gpu_check.sh FOLDER --budget 2400 [--humaneval HumanEval.jsonl.gz] [--seconds N]
#
# PYTHON=python3.12 selects a Python. Repeat the second command while its exit status is 75. Results go to FOLDER
# (default: gpu_results/): report.md, report.json, and the output of every stage. Exit status 1 if a stage failed.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m scripts.gpu_check "$@"
