#!/usr/bin/env bash
# Checks the ./k3 wrapper on a stand-in project: it builds when needed and only then, keeps stdout
# clean, passes arguments and the exit status on, and works through links and paths with spaces.
# usage: run.sh SOURCE_ROOT
set -euo pipefail
source_root=$1
scratch=$(mktemp -d "${TMPDIR:-/tmp}/k3 wrapper.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
project="$scratch/a project"
failures=0

expect() {  # expect WHAT FOUND WANTED
  if [[ $2 == "$3" ]]; then
    echo "ok   $1"
  else
    echo "FAIL $1: found '$2', expected '$3'"
    failures=$((failures + 1))
  fi
}

mkdir -p "$project/src" "$project/apps" "$project/cmake" "$scratch/links"
cp "$source_root/k3" "$project/k3"
cat >"$project/CMakePresets.json" <<'JSON'
{"version": 6, "configurePresets": [{"name": "release", "generator": "Ninja",
  "binaryDir": "${sourceDir}/build/release"}]}
JSON
cat >"$project/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(stand_in LANGUAGES C)
message(STATUS "this line must not reach stdout")
add_executable(k3_program src/main.c)
set_target_properties(k3_program PROPERTIES OUTPUT_NAME k3)
CMAKE
write_program() {  # write_program WORD
  cat >"$project/src/main.c" <<C
#include <stdio.h>
int main(int argc, char** argv) {
  printf("$1 %d [%s]", argc - 1, argc > 1 ? argv[argc - 1] : "");
  return argc > 3 ? 3 : 0;
}
C
}

write_program one
expect "first run builds and runs" "$("$project/k3" 'a  b' 2>/dev/null)" "one 1 [a  b]"
ln -s "$project/k3" "$scratch/links/k3"
expect "works through a link, from another folder" "$(cd / && "$scratch/links/k3" x)" "one 1 [x]"
status=0
"$project/k3" 1 2 3 >/dev/null || status=$?
expect "passes the exit status on" "$status" 3

before=$(stat -c %Y%s "$project/build/k3.log")
"$project/k3" >/dev/null
expect "an up-to-date program is not rebuilt" "$(stat -c %Y%s "$project/build/k3.log")" "$before"
sleep 1.1
touch "$project/src/some_test.cc"
write_program two
expect "a changed source is rebuilt" "$("$project/k3")" "two 0 []"

sleep 1.1
echo "not C" >"$project/src/main.c"
status=0
output=$("$project/k3" 2>"$scratch/errors") || status=$?
expect "a failed build exits 1" "$status" 1
expect "a failed build leaves stdout empty" "$output" ""
expect "a failed build names its log" "$(grep -c 'build/k3.log' "$scratch/errors")" 1
exit $((failures > 0))
