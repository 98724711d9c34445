// Compressed bytes: gzip, bzip2, xz and zstd, told apart by how they begin.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "k3/base/status.h"

namespace k3 {

/// "gzip", "bzip2", "xz", "zstd", or "" for anything else.
std::string_view CompressionOf(std::string_view bytes);

/// All of the contents, members that follow one another joined. Bytes that are not compressed are
/// given back as they are. Checksums are verified. kCorrupt for what is damaged, cut off anywhere,
/// or followed by something else than zeros; kResource for more than `limit` bytes of contents.
/// `where` starts every message.
Result<std::string> Decompress(std::string_view bytes, std::size_t limit, std::string_view where);

}  // namespace k3
