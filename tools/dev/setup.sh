# ./dev setup: packages by name, never removing any; the Python environment of the tests.

# Optional, only a yardstick for bench/onednn_bench.cc: libdnnl-dev.
base_packages=(
  g++ cmake ninja-build ccache lld git ca-certificates
  libfmt-dev libspdlog-dev nlohmann-json3-dev libcli11-dev libxxhash-dev libtomlplusplus-dev
  prometheus-cpp-dev zlib1g-dev libbz2-dev liblzma-dev libzstd-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  python3 python3-venv python3-numpy
)
# Boost 1.74 and 1.81 exclude each other, and either will do: what is there stays.
[[ -e /usr/include/boost/beast.hpp ]] || base_packages+=(libboost1.81-dev)
# Only for the tests of the web page.
browser_packages=(chromium chromium-driver)
# Only for fmt, lint, tidy and fuzz; those verbs install them when first used.
clang_packages=(clang-19 clang-tidy-19 clang-format-19 libclang-rt-19-dev)

is_installed() {
  [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

setup_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "this is no Debian system; what Debian calls these packages must be there: $*"
    return 0
  fi
  local missing=() package
  for package in "$@"; do
    is_installed "$package" || missing+=("$package")
  done
  ((${#missing[@]} > 0)) || return 0

  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "missing packages and no sudo; as root: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing: ${missing[*]}"
  logged apt-update "${as_root[@]}" apt-get update -q || say "apt-get update failed; trying anyway"
  logged apt-install "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
    --no-remove --no-install-recommends "${missing[@]}" || die "could not install ${missing[*]}"
  say "installed ${#missing[@]} packages"
}

# .venv is made anew when tests/requirements.txt changes.
setup_venv() {
  local stamp=.venv/.requirements
  if [[ -x .venv/bin/python ]] && cmp -s tests/requirements.txt "$stamp"; then
    return 0
  fi
  say "making .venv from tests/requirements.txt"
  logged venv "$(python)" -m venv --clear .venv || return 1
  logged pip .venv/bin/python -m pip install --disable-pip-version-check --no-input -q \
    -r tests/requirements.txt || return 1
  cp tests/requirements.txt "$stamp"
}

verb_setup() {
  setup_packages "${base_packages[@]}"
  setup_venv || die "could not make .venv (build/pip.log)"
  say "setup: everything is there"
}
