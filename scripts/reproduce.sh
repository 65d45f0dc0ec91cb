#!/usr/bin/env bash
# Reproduces the paper's figures: makes the environment if missing, runs the experiments, prints where the report is.
# Arguments go to experiments.reproduce; paths among them are relative to the folder you are in.
#
#     scripts/reproduce.sh                     the smoke preset, a few minutes
#     scripts/reproduce.sh --preset=paper      every figure at the paper's size
#     scripts/reproduce.sh --help              all flags
set -euo pipefail

python="$("$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh")"
# -P keeps the current folder off the import path, so a stranger's "experiments" folder there is not picked up.
exec "$python" -P -m experiments.reproduce "$@"
