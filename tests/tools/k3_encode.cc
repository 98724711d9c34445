// Encodes a file with a rank file, for comparing ids and speed with other tokenizers.
//   k3_encode RANKS TEXT OUT [REPEATS]
// OUT receives the ids as native int32. Prints the seconds of loading and of the fastest encoding.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "k3/tokenizer/tokenizer.h"

namespace {

std::optional<std::string> ReadFile(const char* path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    std::fprintf(stderr, "usage: k3_encode RANKS TEXT OUT [REPEATS]\n");
    return 2;
  }
  const auto ranks = ReadFile(argv[1]), text = ReadFile(argv[2]);
  if (!ranks || !text) {
    std::fprintf(stderr, "k3_encode: cannot read %s\n", ranks ? argv[2] : argv[1]);
    return 1;
  }
  const double start = Now();
  const auto tokenizer = k3::Tokenizer::Parse(*ranks, "", argv[1]);
  const double load_s = Now() - start;
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "k3_encode: %s\n", tokenizer.message().c_str());
    return 1;
  }
  std::vector<k3::TokenId> ids;
  double encode_s = 1e30;
  for (int i = 0; i < std::max(1, argc == 5 ? std::atoi(argv[4]) : 1); ++i) {
    const double before = Now();
    ids = tokenizer->Encode(*text);
    encode_s = std::min(encode_s, Now() - before);
  }
  if (tokenizer->Decode(ids) != *text) {
    std::fprintf(stderr, "k3_encode: decoding does not give the text back\n");
    return 1;
  }
  std::ofstream out(argv[3], std::ios::binary);
  out.write(reinterpret_cast<const char*>(ids.data()),
            static_cast<std::streamsize>(ids.size() * sizeof(ids[0])));
  std::printf("{\"load_s\": %.6f, \"encode_s\": %.6f, \"ids\": %zu}\n", load_s, encode_s,
              ids.size());
  return out.flush() ? 0 : 1;
}
