#include "k3/io/decompress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bzlib.h>
#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

#include <functional>
#include <vector>

namespace k3 {
namespace {

using ::testing::HasSubstr;

std::string Text() {
  std::string text;
  for (int i = 0; i < 120; ++i) text += "line " + std::to_string(i * i) + "\n";
  return text;
}

struct Kind {
  const char* name;
  std::function<std::string(const std::string&)> compress;
};

std::vector<Kind> Kinds() {
  auto gz = [](const std::string& in) {
    std::string out(in.size() + 1000, 0);
    z_stream s{};
    deflateInit2(&s, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
    s.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));
    s.avail_in = static_cast<uInt>(in.size());
    s.next_out = reinterpret_cast<Bytef*>(out.data()), s.avail_out = static_cast<uInt>(out.size());
    EXPECT_EQ(deflate(&s, Z_FINISH), Z_STREAM_END);
    out.resize(s.total_out);
    deflateEnd(&s);
    return out;
  };
  auto bz2 = [](const std::string& in) {
    std::string out(in.size() + 1000, 0);
    auto n = static_cast<unsigned>(out.size());
    EXPECT_EQ(BZ2_bzBuffToBuffCompress(out.data(), &n, const_cast<char*>(in.data()),
                                       static_cast<unsigned>(in.size()), 1, 0, 0),
              BZ_OK);
    out.resize(n);
    return out;
  };
  auto xz = [](const std::string& in) {
    std::string out(in.size() + 1000, 0);
    std::size_t n = 0;
    EXPECT_EQ(lzma_easy_buffer_encode(0, LZMA_CHECK_CRC64, nullptr,
                                      reinterpret_cast<const std::uint8_t*>(in.data()), in.size(),
                                      reinterpret_cast<std::uint8_t*>(out.data()), &n, out.size()),
              LZMA_OK);
    out.resize(n);
    return out;
  };
  auto zst = [](const std::string& in) {
    std::string out(in.size() + 1000, 0);
    ZSTD_CCtx* c = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1);
    out.resize(ZSTD_compress2(c, out.data(), out.size(), in.data(), in.size()));
    ZSTD_freeCCtx(c);
    return out;
  };
  return {{"gzip", gz}, {"bzip2", bz2}, {"xz", xz}, {"zstd", zst}};
}

TEST(Decompress, GivesTheContentsOfEveryKind) {
  for (const Kind& k : Kinds()) {
    for (const std::string& text : {Text(), std::string(), std::string(3 << 20, 'x')}) {
      const std::string packed = k.compress(text);
      EXPECT_EQ(CompressionOf(packed), k.name);
      const auto back = Decompress(packed, text.size(), "f");
      ASSERT_TRUE(back.ok()) << k.name << ": " << back.message();
      EXPECT_EQ(*back, text) << k.name;
    }
    const std::string two = k.compress("one ") + k.compress("two");
    EXPECT_EQ(*Decompress(two, 100, "f"), "one two") << k.name;
    EXPECT_EQ(*Decompress(two + std::string(512, '\0'), 100, "f"), "one two") << k.name;
    EXPECT_THAT(Decompress(two + "tail", 100, "f").message(), HasSubstr("other bytes behind"));
  }
}

TEST(Decompress, RefusesEveryTruncation) {
  for (const Kind& k : Kinds()) {
    const std::string packed = k.compress(Text());
    for (std::size_t n = 6; n < packed.size(); ++n) {
      const auto r = Decompress(std::string_view(packed).substr(0, n), 1 << 20, "f");
      ASSERT_FALSE(r.ok()) << k.name << " cut at " << n;
      EXPECT_THAT(r.message(), HasSubstr("f: ")) << n;
      const std::string second = k.compress("a") + packed.substr(0, n);
      EXPECT_FALSE(Decompress(second, 1 << 20, "f").ok()) << k.name << " second cut at " << n;
    }
  }
}

TEST(Decompress, NoticesDamageAnywhereInTheData) {
  for (const Kind& k : Kinds()) {
    const std::string packed = k.compress(Text());
    for (std::size_t at = 12; at + 1 < packed.size(); at += 7) {
      std::string bad = packed;
      bad[at] = static_cast<char>(bad[at] ^ 0x10);
      const auto r = Decompress(bad, 1 << 20, "f");
      EXPECT_TRUE(!r.ok() || *r == Text()) << k.name << " at " << at;
    }
  }
}

TEST(Decompress, StopsAtTheLimit) {
  for (const Kind& k : Kinds()) {
    const auto r = Decompress(k.compress(std::string(5 << 20, 'a')), 1000, "bomb");
    ASSERT_FALSE(r.ok());
    EXPECT_EQ(r.error().code, Code::kResource);
    EXPECT_THAT(r.message(), HasSubstr("bomb: more than 1000 bytes"));
  }
  EXPECT_FALSE(Decompress("plain", 4, "f").ok());
}

TEST(Decompress, LeavesOtherBytesAlone) {
  for (const char* text : {"", "BZh", "BZh9 is how bzip2 begins", "\x1f", "plain text"}) {
    EXPECT_TRUE(CompressionOf(text).empty() || std::string_view(text) == "BZh9") << text;
    const auto r = Decompress(text, 100, "f");
    ASSERT_TRUE(r.ok()) << text;
    EXPECT_EQ(*r, text);
  }
}

}  // namespace
}  // namespace k3
