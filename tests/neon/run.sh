#!/bin/sh
# Builds the NEON kernels with a cross compiler and compares them with the scalar ones under emulation.
# usage: run.sh SOURCE_DIR
set -eu
source_dir=$1
compiler=
for name in aarch64-linux-gnu-g++ aarch64-linux-gnu-g++-14 aarch64-linux-gnu-g++-12; do
  if command -v "$name" > /dev/null; then compiler=$name; break; fi
done
emulator=
for name in qemu-aarch64-static qemu-aarch64; do
  if command -v "$name" > /dev/null; then emulator=$name; break; fi
done
if [ "$(uname -m)" = aarch64 ]; then compiler=${CXX:-g++} emulator=env; fi
if [ -z "$compiler" ] || [ -z "$emulator" ]; then
  echo "SKIP no aarch64 compiler or no emulator (Debian: g++-aarch64-linux-gnu qemu-user-static)"
  exit 77
fi
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
flags="-std=c++20 -O1 -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Werror
  -ffp-contract=off -fno-exceptions -I$source_dir/src"
for file in "$source_dir"/src/k3/kernels/cpu/*.simd.cc; do
  name=$(basename "$file")
  $compiler $flags -DK3_ISA=neon -c "$file" -o "$build/neon_$name.o"
  $compiler $flags -DK3_ISA=scalar -DK3_SCALAR -c "$file" -o "$build/scalar_$name.o"
done
$compiler -std=c++20 -O1 -static -I"$source_dir/src" "$source_dir/tests/neon/neon_test.cc" \
  "$build"/*.o -o "$build/neon_test"
$emulator "$build/neon_test"
