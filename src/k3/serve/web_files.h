// The web page, compiled into the program: src/k3/serve/web.
#pragma once

#include <span>
#include <string_view>

namespace k3::serve {

struct WebFile {
  std::string_view name;  // "index.html", "chat.js", ...
  std::string_view body;
};

std::span<const WebFile> WebFiles();

/// The file of a request's path: "/" is index.html, "/ui/NAME" any other; nullptr when there is
/// none.
const WebFile* FindWebFile(std::string_view path);

/// "text/html; charset=utf-8", ... by the name's end.
std::string_view ContentType(const WebFile& file);

/// What a browser may do with the page: nothing but itself and this server.
inline constexpr std::string_view kWebPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

}  // namespace k3::serve
