// Checks and times the CUDA KDA on this machine's GPU and prints one table.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "device_problem.h"

namespace {

constexpr const char* kUsage =
    "usage: k3_kda_gpu [MODE] [--json FILE] [--commit TEXT] [--driver TEXT]\n"
    "  all      checks, hostile and bench (the default)\n"
    "  check    every result against a float64 recurrence\n"
    "  small    the short lists of check and hostile, for compute-sanitizer\n"
    "  hostile  device memory a caller got wrong, and the ends of the shapes\n"
    "  bench    times; forward and decode alone: `forward`, `decode`\n"
    "  profile  each kernel of H96 1x8192 twice, for a profiler\n"
    "exit status: 0 all rows within their limits, 1 some are not or FILE failed, 2 wrong usage,\n"
    "             3 CUDA failed, 77 no GPU of compute capability 9.0\n";

struct Options {
  std::string mode = "all", json, commit = "unknown", nvidia_driver;
};

/// False, with a line on stderr, when the arguments make no sense.
bool Parse(int argc, char** argv, Options& options) {
  const char* modes[] = {"all",   "check",   "small",  "hostile",
                         "bench", "forward", "decode", "profile"};
  int words = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    std::string* value = word == "--json"     ? &options.json
                         : word == "--commit" ? &options.commit
                         : word == "--driver" ? &options.nvidia_driver
                                              : nullptr;
    if (value != nullptr) {
      if (++i == argc || !*argv[i]) {
        std::fprintf(stderr, "k3_kda_gpu: %s needs a value\n", word.c_str());
        return false;
      }
      *value = argv[i];
      continue;
    }
    const bool known = std::any_of(std::begin(modes), std::end(modes),
                                   [&](const char* mode) { return word == mode; });
    if (!known || ++words > 1) {
      std::fprintf(stderr, "k3_kda_gpu: %s '%s'\n", known ? "second mode" : "unknown argument",
                   word.c_str());
      return false;
    }
    options.mode = word;
  }
  return true;
}

/// Of the kernel module, if the system shows it: "580.159.04".
std::string NvidiaDriver() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string word;
  while (file >> word) {
    if (word.size() >= 5 && std::isdigit(static_cast<unsigned char>(word[0])) &&
        word.find('.') != std::string::npos) {
      return word;
    }
  }
  return "unknown";
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

void WriteHead(std::FILE* to, const Options& options, const cudaDeviceProp& device, int driver) {
  std::fprintf(to,
               "{\n  \"gpu\": %s,\n  \"sms\": %d,\n  \"driver\": %d,\n  \"nvidia_driver\": %s,\n"
               "  \"commit\": %s,\n  \"mode\": %s,\n"
               "  \"method\": \"CUDA events, median of 20 calls after 3 (backward 10, recurrent "
               "softplus 5); decode: CUDA graph, 25 replays\",\n"
               "  \"shapes\": \"D = 128; HxN: heads; 1x8192: one sequence of 8192 tokens; varlen6: "
               "1300, 547, 2048, 963, 271, 3063; drafts k: k tokens a sequence, states and tails "
               "after each kept\",\n  \"rows\": [",
               Quoted(device.name).c_str(), device.multiProcessorCount, driver,
               Quoted(options.nvidia_driver).c_str(), Quoted(options.commit).c_str(),
               Quoted(options.mode).c_str());
}

int Run(const Options& options, k3::bench::Report& report) {
  const std::string& mode = options.mode;
  const bool all = mode == "all", small = mode == "small";
  int failed = 0;
  if (mode == "profile") k3::bench::RunProfile();
  if (mode == "forward") k3::bench::RunForwardBench(report);
  if (mode == "decode") k3::bench::RunDecodeBench(report);
  if (all || small || mode == "check") failed += k3::bench::RunChecks(report, small);
  if (all || small || mode == "hostile") failed += k3::bench::RunHostile(report, small);
  if (all || mode == "bench") k3::bench::RunBench(report);
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (argc == 2 && (!std::strcmp(argv[1], "--help") || !std::strcmp(argv[1], "-h"))) {
    std::printf("%s", kUsage);
    return 0;
  }
  if (!Parse(argc, argv, options)) {
    std::fprintf(stderr, "%s", kUsage);
    return 2;
  }
  int devices = 0, driver = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIP no GPU is visible\n");
    return 77;
  }
  cudaDeviceProp device;
  CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  if (device.major != 9) {
    std::printf("SKIP %s has compute capability %d.%d, the kernels need 9.0\n", device.name,
                device.major, device.minor);
    return 77;
  }
  cudaDriverGetVersion(&driver);
  if (options.nvidia_driver.empty()) options.nvidia_driver = NvidiaDriver();
  std::printf("%s, %d SMs, CUDA driver %d (%s), commit %s\n", device.name,
              device.multiProcessorCount, driver, options.nvidia_driver.c_str(),
              options.commit.c_str());
  k3::bench::Report report;
  if (!options.json.empty()) {
    report.json = std::fopen(options.json.c_str(), "w");
    if (!report.json) {
      std::fprintf(stderr, "k3_kda_gpu: %s cannot be written\n", options.json.c_str());
      return 1;
    }
    WriteHead(report.json, options, device, driver);
  }
  const int failed = Run(options, report);
  std::printf("%d rows outside their limits\n", failed);
  if (!report.json) return failed ? 1 : 0;
  std::fprintf(report.json, "\n  ],\n  \"failed\": %d\n}\n", failed);
  const bool written = !std::ferror(report.json);
  if (std::fclose(report.json) != 0 || !written) {
    std::fprintf(stderr, "k3_kda_gpu: %s was not written in full\n", options.json.c_str());
    return 1;
  }
  return failed ? 1 : 0;
}
