// Runs a fuzz target once on the empty input and once on every file of a folder: a cheap check,
// with any compiler, that no input which once broke something breaks it again.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;
  std::vector<std::filesystem::path> files;
  std::error_code error;
  if (argc > 1) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[1], error)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
  }
  LLVMFuzzerTestOneInput(nullptr, 0);
  if (files.empty()) {
    std::printf("SKIP no seeds in %s\n", argc > 1 ? argv[1] : "(no folder given)");
    return kSkipped;
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
    std::printf("%s: %zu bytes\n", file.filename().c_str(), bytes.size());
    std::fflush(stdout);  // so that a crash leaves the name of its input
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  std::printf("%zu seeds replayed\n", files.size());
  return 0;
}
