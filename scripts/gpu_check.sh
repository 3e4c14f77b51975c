#!/usr/bin/env bash
# Checks and measures the decode kernel on a GPU. Call 1 ends within 420 s: does it work, how fast is it, and why. Call 2
# ends within 300 s: other weights and models, all microbenchmarks, the tests. With --budget it instead pretrains a
# model, scores it and measures its speed (docs/gpu.md).
#
#   scripts/gpu_check.sh [FOLDER] [--call 1|2] [--pack FILE.tgz] [--stages a,b] [--seconds N] [--wheels FOLDER] [--dry-run]
#   scripts/gpu_check.sh FOLDER --budget 2400 [--humaneval HumanEval.jsonl.gz] [--seconds N]
#
# PYTHON=python3.12 selects a Python. Repeat the second command while its exit status is 75. Results go to FOLDER
# (default: gpu_results/): report.md, report.json, and the output of every stage. Exit status 1 if a stage failed.
set -euo pipefail
cd "$(dirname "$0")/.."
for link in train:train infer:infer custom_calls:custom_calls configs:recipes scripts:commands; do
  # A copy of the repository may lack its links.
  [ -d "laneformer/${link#*:}" ] || ln -sfn "../${link%:*}" "laneformer/${link#*:}"
done
exec "${PYTHON:-python3}" -m scripts.gpu_check "$@"
