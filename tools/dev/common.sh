# Shared by the verbs of ./dev. Sourced with the repository root as working directory.

# The toolkit's installer leaves its folder off PATH.
if ! command -v nvcc >/dev/null && [[ -x /usr/local/cuda/bin/nvcc ]]; then
  PATH=$PATH:/usr/local/cuda/bin
fi

say() { echo "dev: $*"; }
die() {
  echo "dev: $*" >&2
  exit 1
}

jobs() { echo "${K3_JOBS:-$(nproc)}"; }

# Debian's own Python: the first one on PATH may be another without the modules we installed.
python() { if [[ -x /usr/bin/python3 ]]; then echo /usr/bin/python3; else command -v python3; fi; }

git_commit() { git describe --always --dirty 2>/dev/null || echo "unknown"; }

cpp_files() { git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh'; }

# logged NAME COMMAND...: output goes to build/NAME.log; on failure its end is shown.
logged() {
  local log=build/$1.log started=$SECONDS
  shift
  if "$@" >"$log" 2>&1 </dev/null; then
    return 0
  fi
  local failed_after=$((SECONDS - started))
  # Compilers print the first error far above the end when several jobs run.
  grep -E '(error|Error)( at .*)?: |^FAILED: |^E: ' "$log" | sort -u | head -n 20 | cut -c -300 || true
  echo "--- end of $log"
  tail -n 15 "$log" | cut -c -300
  echo "dev: failed after $failed_after s: $*" >&2
  return 1
}

configure() {  # configure PRESET [CMAKE ARGUMENT...]
  local preset=$1
  shift
  if [[ $# == 0 && -f build/$preset/build.ninja ]]; then
    return 0 # ninja configures again by itself when a CMake file changes
  fi
  logged "configure-$preset" cmake --preset "$preset" "$@"
}

build() {  # build PRESET [TARGET...]
  local preset=$1 started=$SECONDS
  shift
  configure "$preset" || return 1
  local keep_going=()
  [[ $preset != tidy ]] || keep_going=(-- -k 0) # all findings at once
  logged "build-$preset" cmake --build "build/$preset" -j "$(jobs)" ${1:+--target "$@"} \
    "${keep_going[@]}" || return 1
  say "built $preset${1:+ ($*)} in $((SECONDS - started)) s"
}
