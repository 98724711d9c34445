#!/usr/bin/env bash
# Checks and times the CUDA KDA on this machine's GPU: one table, and JSON if a file is named.
#   bench/gpu/run.sh PROGRAM [JSON] [COMMIT]
# PROGRAM is k3_kda_gpu, built by: cmake --preset device && cmake --build --preset device
# K3_MODE picks another mode than `all` (PROGRAM --help lists them); K3_EXAMPLES=DIR first runs the
# examples of the C interface that lie in DIR (build/device/examples/kda).
# With K3_SANITIZE=memcheck or racecheck it runs the short case list under that tool instead. The
# program is then built with -DCMAKE_CUDA_FLAGS=-DK3_KDA_SERIAL for memcheck and with
# -DCMAKE_CUDA_FLAGS=-DK3_KDA_PLAIN_BARRIERS for racecheck (docs/kda-on-hopper.md says why).
# Exit status: the program's (77: no GPU), 2 for wrong usage.
set -euo pipefail
die() { echo "run.sh: $*" >&2; exit 2; }
(($# >= 1 && $# <= 3)) || die "usage: run.sh PROGRAM [JSON] [COMMIT]"
program=$1
[[ -f $program && -x $program ]] ||
  die "'$program' is no program; build it: cmake --preset device && cmake --build --preset device"
[[ $program == */* ]] || program=./$program

if [[ -n ${K3_SANITIZE:-} ]]; then
  [[ $K3_SANITIZE == memcheck || $K3_SANITIZE == racecheck ]] ||
    die "K3_SANITIZE is '$K3_SANITIZE', not memcheck or racecheck"
  command -v compute-sanitizer >/dev/null || die "compute-sanitizer is not on PATH"
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  compute-sanitizer --tool "$K3_SANITIZE" --error-exitcode 1 "$program" small | tee "$log"
  grep -qE 'SUMMARY: 0 (errors|hazards)' "$log"  # racecheck's exit status does not tell
  exit
fi

if [[ -n ${K3_EXAMPLES:-} ]]; then
  [[ -x $K3_EXAMPLES/kda_example ]] || die "there is no kda_example in '$K3_EXAMPLES'"
  "$K3_EXAMPLES/kda_example"
  if python3 -c 'import numpy' 2>/dev/null; then
    python3 "$(dirname "${BASH_SOURCE[0]}")/../../examples/kda/kda.py" "$K3_EXAMPLES/libk3_kda.so"
  else
    echo "SKIP kda.py: python3 has no numpy"
  fi
fi
arguments=("${K3_MODE:-all}" --commit "${3:-unknown}")
[[ -n ${2:-} ]] && arguments+=(--json "$2")
if driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) &&
  [[ $driver =~ ^[0-9] ]]; then
  arguments+=(--driver "$driver")
fi
exec "$program" "${arguments[@]}"
