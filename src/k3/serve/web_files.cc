#include "k3/serve/web_files.h"

namespace k3::serve {

const WebFile* FindWebFile(std::string_view path) {
  constexpr std::string_view kFolder = "/ui/";
  std::string_view name;
  if (path == "/") {
    name = "index.html";
  } else if (path.starts_with(kFolder)) {
    name = path.substr(kFolder.size());
    if (name == "index.html") return nullptr;
  }
  for (const WebFile& file : WebFiles()) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

std::string_view ContentType(const WebFile& file) {
  if (file.name.ends_with(".html")) return "text/html; charset=utf-8";
  if (file.name.ends_with(".css")) return "text/css; charset=utf-8";
  return "text/javascript; charset=utf-8";
}

}  // namespace k3::serve
