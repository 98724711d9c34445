#include "k3/io/decompress.h"

#include <algorithm>
#include <limits>
#include <memory>

#include <bzlib.h>
#include <fmt/format.h>
#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

namespace k3 {
namespace {

/// Input that is left, and room for output.
struct Piece {
  const char* in;
  std::size_t in_size;
  char* out;
  std::size_t out_size;
};

enum class Step : std::uint8_t { kMore, kMemberEnd, kBad };

/// One library's decoder, at the start of a member.
class Decoder {
 public:
  virtual ~Decoder() = default;
  /// Moves the piece forward.
  virtual Step Run(Piece& p) = 0;
};

/// What a library with 32-bit counts takes at once.
unsigned Part(std::size_t n) {
  return static_cast<unsigned>(std::min<std::size_t>(n, std::numeric_limits<int>::max()));
}

/// For the libraries that share the shape of zlib's stream.
template <class Stream>
void Advance(Piece& p, const Stream& s) {
  const std::size_t used =
      static_cast<std::size_t>(reinterpret_cast<const char*>(s.next_in) - p.in);
  const std::size_t made = static_cast<std::size_t>(reinterpret_cast<char*>(s.next_out) - p.out);
  p.in += used, p.in_size -= used, p.out += made, p.out_size -= made;
}

class Gzip final : public Decoder {
 public:
  Gzip() { ok_ = inflateInit2(&s_, 15 + 16) == Z_OK; }
  ~Gzip() override { inflateEnd(&s_); }
  Step Run(Piece& p) override {
    if (!ok_) return Step::kBad;
    s_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(p.in));  // it is only read
    s_.avail_in = Part(p.in_size);
    s_.next_out = reinterpret_cast<Bytef*>(p.out), s_.avail_out = Part(p.out_size);
    const int r = inflate(&s_, Z_NO_FLUSH);
    Advance(p, s_);
    if (r == Z_STREAM_END) return Step::kMemberEnd;
    return r == Z_OK || r == Z_BUF_ERROR ? Step::kMore : Step::kBad;
  }

 private:
  z_stream s_{};
  bool ok_ = false;
};

class Bzip2 final : public Decoder {
 public:
  Bzip2() { ok_ = BZ2_bzDecompressInit(&s_, 0, 0) == BZ_OK; }
  ~Bzip2() override { BZ2_bzDecompressEnd(&s_); }
  Step Run(Piece& p) override {
    if (!ok_) return Step::kBad;
    s_.next_in = const_cast<char*>(p.in), s_.avail_in = Part(p.in_size);
    s_.next_out = p.out, s_.avail_out = Part(p.out_size);
    const int r = BZ2_bzDecompress(&s_);
    Advance(p, s_);
    if (r == BZ_STREAM_END) return Step::kMemberEnd;
    return r == BZ_OK ? Step::kMore : Step::kBad;
  }

 private:
  bz_stream s_{};
  bool ok_ = false;
};

class Xz final : public Decoder {
 public:
  Xz() { ok_ = lzma_stream_decoder(&s_, std::uint64_t{1} << 30, 0) == LZMA_OK; }
  ~Xz() override { lzma_end(&s_); }
  Step Run(Piece& p) override {
    if (!ok_) return Step::kBad;
    s_.next_in = reinterpret_cast<const std::uint8_t*>(p.in), s_.avail_in = p.in_size;
    s_.next_out = reinterpret_cast<std::uint8_t*>(p.out), s_.avail_out = p.out_size;
    const lzma_ret r = lzma_code(&s_, LZMA_RUN);
    Advance(p, s_);
    if (r == LZMA_STREAM_END) return Step::kMemberEnd;
    return r == LZMA_OK || r == LZMA_BUF_ERROR ? Step::kMore : Step::kBad;
  }

 private:
  lzma_stream s_ = LZMA_STREAM_INIT;
  bool ok_ = false;
};

class Zstd final : public Decoder {
 public:
  Zstd() : s_(ZSTD_createDStream()) {}
  ~Zstd() override { ZSTD_freeDStream(s_); }
  Step Run(Piece& p) override {
    if (s_ == nullptr) return Step::kBad;
    ZSTD_inBuffer in{p.in, p.in_size, 0};
    ZSTD_outBuffer out{p.out, p.out_size, 0};
    const std::size_t r = ZSTD_decompressStream(s_, &out, &in);
    p.in += in.pos, p.in_size -= in.pos, p.out += out.pos, p.out_size -= out.pos;
    if (ZSTD_isError(r) != 0) return Step::kBad;
    return r == 0 ? Step::kMemberEnd : Step::kMore;
  }

 private:
  ZSTD_DStream* s_;
};

std::unique_ptr<Decoder> NewDecoder(std::string_view kind) {
  if (kind == "gzip") return std::make_unique<Gzip>();
  if (kind == "bzip2") return std::make_unique<Bzip2>();
  if (kind == "xz") return std::make_unique<Xz>();
  return std::make_unique<Zstd>();
}

}  // namespace

std::string_view CompressionOf(std::string_view b) {
  if (b.starts_with("\x1f\x8b")) return "gzip";
  if (b.size() >= 4 && b.starts_with("BZh") && b[3] >= '1' && b[3] <= '9') {
    // A text may begin so; the first block or the end of an empty stream says which it is.
    const std::string_view next = b.substr(4);
    const auto agrees = [next](std::string_view magic) {
      const std::size_t n = std::min(next.size(), magic.size());
      return next.substr(0, n) == magic.substr(0, n);
    };
    if (agrees("1AY&SY") || agrees("\x17rE8P\x90")) return "bzip2";
  }
  if (b.starts_with(std::string_view("\xfd"
                                     "7zXZ\0",
                                     6)))
    return "xz";
  if (b.starts_with("\x28\xb5\x2f\xfd")) return "zstd";
  return "";
}

Result<std::string> Decompress(std::string_view bytes, std::size_t limit, std::string_view where) {
  const std::string_view kind = CompressionOf(bytes);
  if (kind.empty()) {
    if (bytes.size() <= limit) return std::string(bytes);
    return Error{Code::kResource,
                 fmt::format("{}: {} bytes, expected at most {}", where, bytes.size(), limit)};
  }
  constexpr std::size_t kRoom = std::size_t{1} << 16;
  std::string text;
  Piece p{bytes.data(), bytes.size(), nullptr, 0};
  auto offset = [&] { return p.in - bytes.data(); };
  while (p.in_size > 0) {
    const std::string_view rest(p.in, p.in_size);
    if (rest.find_first_not_of('\0') == std::string_view::npos) break;  // padding
    if (CompressionOf(rest) != kind) {
      return Error{Code::kCorrupt,
                   fmt::format("{}: found other bytes behind the {} data at byte {}", where, kind,
                               offset())};
    }
    const std::unique_ptr<Decoder> decoder = NewDecoder(kind);
    for (Step step = Step::kMore; step == Step::kMore;) {
      const std::size_t size = text.size(), before = p.in_size;
      text.resize(size + kRoom);
      p.out = text.data() + size, p.out_size = kRoom;
      step = decoder->Run(p);
      text.resize(size + kRoom - p.out_size);
      if (step == Step::kBad) {
        return Error{Code::kCorrupt,
                     fmt::format("{}: damaged {} data at byte {}", where, kind, offset())};
      }
      if (text.size() > limit) {
        return Error{Code::kResource,
                     fmt::format("{}: more than {} bytes of contents", where, limit)};
      }
      if (step == Step::kMore && p.in_size == before && text.size() == size) {
        return Error{Code::kCorrupt,
                     fmt::format("{}: {} data ends early, at byte {}", where, kind, offset())};
      }
    }
  }
  return text;
}

}  // namespace k3
