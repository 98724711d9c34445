#!/usr/bin/env bash
# Checks and times the CUDA KDA on this machine's GPU: one table, and JSON if a file is named.
#   bench/gpu/run.sh PROGRAM [JSON] [COMMIT]
# PROGRAM is k3_kda_gpu, built by: cmake --preset device && cmake --build --preset device
# With K3_SANITIZE=1 it runs the short case list under compute-sanitizer instead; the program should
# then be built with -DCMAKE_CUDA_FLAGS=-DK3_KDA_SERIAL (see src/k3/kernels/cuda/hopper.cuh).
set -euo pipefail
program=${1:?usage: run.sh PROGRAM [JSON] [COMMIT]}
if [[ ${K3_SANITIZE:-0} == 1 ]]; then
  compute-sanitizer --tool memcheck --error-exitcode 1 "$program" small
  compute-sanitizer --tool racecheck "$program" small
  exit
fi
arguments=(all --commit "${3:-unknown}")
[[ -n ${2:-} ]] && arguments+=(--json "$2")
exec "$program" "${arguments[@]}"
