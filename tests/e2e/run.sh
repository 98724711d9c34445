#!/usr/bin/env bash
# Runs the end-to-end tests in the project's own Python environment.
# usage: run.sh K3_PROGRAM [JUNIT_FILE [PYTEST ARGUMENT...]]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$root/.venv/bin/python

if [[ ! -x $python ]]; then
  echo "SKIP no .venv: run ./dev setup"
  exit 77
fi
export K3_BIN=$1
junit=${2:-}
# Bytecode of hostile-path tests must not end up in the source tree.
export PYTHONDONTWRITEBYTECODE=1
status=0
"$python" -m pytest "$here" -q -ra -p no:cacheprovider ${junit:+"--junitxml=$junit"} "${@:3}" ||
  status=$?
if [[ $status == 5 ]]; then  # pytest: nothing collected
  [[ -n ${K3_TEST_FILTER:-} ]] && exit 0
  echo "SKIP no end-to-end test was collected"
  exit 77
fi
exit "$status"
