#include "k3/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace k3 {

void CheckFailed(const char* file, int line, const char* condition, const char* what) {
  std::fprintf(stderr, "k3: internal error: %s (%s) at %s:%d\n", what, condition, file, line);
  std::abort();
}

}  // namespace k3
