#include "k3/serve/web_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

namespace k3::serve {
namespace {

TEST(WebFiles, AreTheFilesOfTheFolder) {
  ASSERT_GE(WebFiles().size(), 7u);
  for (const WebFile& file : WebFiles()) {
    std::ifstream in(std::string(K3_SOURCE_DIR "/src/k3/serve/web/") + std::string(file.name),
                     std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    EXPECT_EQ(file.body, text.str()) << file.name;
  }
}

TEST(WebFiles, AreFoundByPathAndNothingElseIs) {
  ASSERT_NE(FindWebFile("/"), nullptr);
  EXPECT_EQ(FindWebFile("/")->name, "index.html");
  EXPECT_EQ(ContentType(*FindWebFile("/")), "text/html; charset=utf-8");
  EXPECT_EQ(ContentType(*FindWebFile("/ui/style.css")), "text/css; charset=utf-8");
  EXPECT_EQ(ContentType(*FindWebFile("/ui/main.js")), "text/javascript; charset=utf-8");
  for (const char* path : {"", "/ui", "/ui/", "/ui/index.html", "/ui/../main.js", "/main.js",
                           "/ui//main.js", "/ui/main.js/"}) {
    EXPECT_EQ(FindWebFile(path), nullptr) << path;
  }
}

/// The page's policy lets it talk to this server alone, so every address in it must be relative.
TEST(WebFiles, NameNoOtherServer) {
  for (const WebFile& file : WebFiles()) {
    EXPECT_EQ(file.body.find("http:"), std::string_view::npos) << file.name;
    EXPECT_EQ(file.body.find("https:"), std::string_view::npos) << file.name;
    EXPECT_EQ(file.body.find("eval("), std::string_view::npos) << file.name;
  }
  EXPECT_EQ(kWebPolicy.find("unsafe"), std::string_view::npos);
}

}  // namespace
}  // namespace k3::serve
