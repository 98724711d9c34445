# ./dev test: everything a change must pass, counted in one last line.

checks=() # "NAME=pass", "NAME=fail" or "NAME=skip:REASON" of what is no ctest
runs=()   # "JUNIT=RESULTS_DIR" of each ctest run

record() { checks+=("$1=$2"); }

run_ctest() {  # run_ctest PRESET [CTEST ARGUMENT...]
  local preset=$1 started=$SECONDS
  shift
  local junit=$PWD/build/ctest-$preset.xml
  rm -rf "build/$preset/test-results" "$junit"
  runs+=("$junit=build/$preset/test-results")
  ctest --test-dir "build/$preset" --output-junit "$junit" --output-on-failure "$@" \
    >"build/ctest-$preset.log" 2>&1 </dev/null || ctest_failures "build/ctest-$preset.log"
  say "tests of $preset took $((SECONDS - started)) s"
}

ctest_failures() {  # the failing tests' own words, without those of the passing ones
  grep -E '^\[  FAILED|: Failure$|FAIL|^E  |Error|ERROR' "$1" | head -n 40 || true
  echo "--- full output: $1"
}

build_counted() {  # build_counted PRESET [TARGET...]; a failure is one failed check
  if build "$@"; then return 0; fi
  record "build of $1" fail
  return 1
}

# How a test's name part becomes a GoogleTest filter and a pytest expression: op names are written
# rms_norm here and RmsNorm in test names.
filter_environment() {
  local word=${1#op=} camel
  camel=$(sed -E 's/(^|_)([a-z0-9])/\U\2/g' <<<"$word")
  export GTEST_FILTER="*$word*:*$camel*"
  export PYTEST_ADDOPTS="-k ${word##*.}"
  export K3_TEST_FILTER=$word
}

test_filtered() {
  build_counted release || return 0
  case $1 in
    unit | conformance | e2e | check | fuzz) run_ctest release -L "^$1\$" ;;
    *)
      filter_environment "$1"
      run_ctest release -LE '^(check|fuzz)$'
      ;;
  esac
}

kda_example_runs() {  # on a GPU or as far as it comes without one
  local status=0
  build/cuda/examples/kda/kda_example >build/kda-example.log 2>&1 || status=$?
  ((status == 0 || status == 77)) || { cat build/kda-example.log; return 1; }
}

test_cuda_compiles() {
  if ! command -v nvcc >/dev/null; then
    record "CUDA build" "skip:nvcc is not on PATH"
  elif build cuda k3_program kda_example && kda_example_runs; then
    record "CUDA build" pass
  else
    record "CUDA build" fail
  fi
}

test_sanitized() {  # test_sanitized PRESET
  build_counted "$1" k3_sanitize_tests || return 0
  ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 run_ctest "$1" -L '^sanitize$' \
    -j "$(jobs)"
}

test_everything() {
  if build_counted release; then run_ctest release -j "$(jobs)"; fi
  # Minutes each under a sanitizer: they run plainly above, and sanitized in ./dev asan.
  GTEST_FILTER='-*ReleaseSizedFolder*:*/tiny_*:SelfCheck.AllIdentities*:KvCases.Kv08*' \
    test_sanitized asan-core
  test_cuda_compiles
}

verb_asan() {
  verb_setup
  test_sanitized asan
  "$(python)" tools/count_tests.py "${runs[@]}" --check "${checks[@]}"
}

verb_test() {
  (($# <= 1)) || die "test takes one filter"
  verb_setup
  setup_packages "${browser_packages[@]}"
  if (($# == 1)); then test_filtered "$1"; else test_everything; fi
  "$(python)" tools/count_tests.py "${runs[@]}" --check "${checks[@]}"
}
