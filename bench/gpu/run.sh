#!/usr/bin/env bash
# Checks and times the CUDA KDA on this machine's GPU: one table, and JSON if a file is named.
#   bench/gpu/run.sh PROGRAM [JSON] [COMMIT]
# PROGRAM is k3_kda_gpu, built by: cmake --preset device && cmake --build --preset device
# With K3_SANITIZE=memcheck or racecheck it runs the short case list under that tool instead. The
# program is then built with -DCMAKE_CUDA_FLAGS=-DK3_KDA_SERIAL for memcheck and with
# -DCMAKE_CUDA_FLAGS=-DK3_KDA_PLAIN_BARRIERS for racecheck (docs/kda-on-hopper.md says why).
set -euo pipefail
program=${1:?usage: run.sh PROGRAM [JSON] [COMMIT]}
if [[ -n ${K3_SANITIZE:-} ]]; then
  log=$(mktemp)
  compute-sanitizer --tool "$K3_SANITIZE" --error-exitcode 1 "$program" small | tee "$log"
  grep -qE 'SUMMARY: 0 (errors|hazards)' "$log"  # racecheck's exit status does not tell
  exit
fi
arguments=(all --commit "${3:-unknown}")
[[ -n ${2:-} ]] && arguments+=(--json "$2")
exec "$program" "${arguments[@]}"
