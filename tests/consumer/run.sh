#!/usr/bin/env bash
# Installs a build tree into a scratch folder and builds a small project against it.
# usage: run.sh BUILD_DIR
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build_dir=$1
scratch=$(mktemp -d "${TMPDIR:-/tmp}/k3 consumer.XXXXXX")  # a path with a space, as users have
trap 'rm -rf "$scratch"' EXIT

fail() { echo "FAIL $*" >&2; exit 1; }

cmake --install "$build_dir" --prefix "$scratch/prefix" >"$scratch/install.log"
for path in bin/k3 include/k3/kda.h include/k3/base/status.h share/k3/models/k3-books-27m/config.json; do
  [[ -e $scratch/prefix/$path ]] || fail "the installed tree lacks $path"
done
internal=$(find "$scratch/prefix/include" -name '*_internal.h' -o -path '*/kernels/cpu*' \
  -o -path '*/kernels/cuda/*' -o -path '*/kernels/cuda_stub/*' -o -name '*_test*')
[[ -z $internal ]] || fail "internal files were installed: $internal"

# The scratch folder must not find this source tree by accident, so nothing of it is passed on.
cmake -S "$here" -B "$scratch/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$scratch/prefix" -DK3_INSTALLED_INCLUDE="$scratch/prefix/include"
cmake --build "$scratch/build" -j 2
"$scratch/build/consumer"

# The KDA kernels alone, from C and from Python. 77: no GPU here, which is as far as it can be run.
cmake -S "$here/../../examples/kda" -B "$scratch/kda" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$scratch/prefix"
cmake --build "$scratch/kda" -j 2
status=0
"$scratch/kda/kda_example" || status=$?
((status == 0 || status == 77)) || fail "kda_example: exit status $status"
library=$(find "$scratch/prefix" -name libk3_kda.so)
if ldd "$library" | grep -E 'libstdc\+\+|libcudart|libfmt|not found'; then
  fail "libk3_kda.so needs more than libc"
fi
if /usr/bin/python3 -c 'import numpy' 2>/dev/null; then
  status=0
  /usr/bin/python3 "$here/../../examples/kda/kda.py" "$library" || status=$?
  ((status == 0 || status == 77)) || fail "kda.py: exit status $status"
else
  echo "SKIP kda.py: no numpy for /usr/bin/python3"
fi

if grep -rlF "$(cd "$here/../.." && pwd)" "$scratch/prefix" --include='*.cmake'; then
  fail "the CMake package mentions the source tree"
fi
echo "consumer: installed, found, built and run"
