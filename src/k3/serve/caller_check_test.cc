#include "k3/serve/caller_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "k3/serve/serve_test_util.h"

namespace k3::serve {
namespace {

HttpRequest HeadWith(std::string method, HeaderList headers) {
  HttpRequest r;
  r.method = std::move(method);
  r.path = "/v1/models";
  r.headers = std::move(headers);
  return r;
}

TEST(CallerCheck, HostsOfThisMachineAndThoseNamed) {
  const std::vector<std::string> names{"box.example", "[fe80::1]"};
  for (const char* good : {"localhost", "LocalHost:8080", "127.0.0.1", "127.0.0.1:1", "[::1]",
                           "[::1]:8080", "box.example", "BOX.example:443", "[FE80::1]:80"}) {
    EXPECT_TRUE(IsAllowedHost(good, names)) << good;
  }
  for (const char* bad :
       {"", ":80", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.2",
        "localhost:80x", "localhost:80:80", "[::1", "[::1].evil.example", "[::1]x:80", "::1",
        "evil.example:127.0.0.1", "localhost@evil.example", "box.example.", "[", "]"}) {
    EXPECT_FALSE(IsAllowedHost(bad, names)) << bad;
  }
}

TEST(CallerCheck, PagesOfOtherSitesMayNotCall) {
  const auto status = [](const HttpRequest& head, std::string_view cors = "") {
    const ApiStatus s = CheckCaller(head, {}, cors);
    return s ? s->code : "";
  };
  EXPECT_EQ(status(HeadWith("GET", {})), "");
  EXPECT_EQ(status(HeadWith("POST", {})), "");
  EXPECT_EQ(status(HeadWith("GET", {{"host", "evil.example:8080"}})), "host_not_allowed");
  EXPECT_EQ(status(HeadWith("OPTIONS", {{"host", "evil.example"}}), "*"), "host_not_allowed");
  const HeaderList page{{"host", "127.0.0.1:8080"}, {"origin", "http://evil.example"}};
  EXPECT_EQ(status(HeadWith("POST", page)), "origin_not_allowed");
  EXPECT_EQ(status(HeadWith("GET", page)), "") << "the browser keeps the answer from the page";
  EXPECT_EQ(status(HeadWith("POST", page), "*"), "");
  EXPECT_EQ(status(HeadWith("POST", page), "http://evil.example"), "");
  EXPECT_EQ(status(HeadWith("POST", page), "http://good.example"), "origin_not_allowed");
  for (const char* bad : {"null", "localhost", "file://localhost", "http://", "http://localhost.x"})
    EXPECT_EQ(status(HeadWith("POST", {{"origin", bad}})), "origin_not_allowed") << bad;
  EXPECT_EQ(status(HeadWith("POST", {{"origin", "http://localhost:3000"}})), "");
}

TEST(CallerCheck, TheApiAsksOnlyWhenTold) {
  Api open({});
  const HttpRequest evil = HeadWith("GET", {{"host", "evil.example"}});
  EXPECT_FALSE(open.Screen(evil));
  ApiOptions o;
  o.check_caller = true;
  Api checked(o);
  const auto refused = checked.Screen(evil);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status, 403);
  EXPECT_EQ(nlohmann::json::parse(refused->body)["error"]["code"], "host_not_allowed");
  EXPECT_EQ(nlohmann::json::parse(refused->body)["error"]["type"], "invalid_request_error");
  HttpRequest messages = evil;
  messages.path = "/v1/messages";
  messages.method = "POST";
  EXPECT_EQ(nlohmann::json::parse(checked.Screen(messages)->body)["error"]["type"],
            "permission_error");
  EXPECT_TRUE(checked.Screen(HeadWith("OPTIONS", {{"host", "evil.example"}})));
  o.allowed_hosts = {"evil.example"};
  EXPECT_FALSE(Api(o).Screen(evil));
}

TEST(CallerCheck, CompressedBodiesAreRefused) {
  Api api({});
  EXPECT_FALSE(api.Screen(HeadWith("GET", {{"content-encoding", "Identity"}})));
  EXPECT_FALSE(api.Screen(HeadWith("GET", {{"content-encoding", ""}})));
  const auto refused =
      api.Screen(HeadWith("GET", {{"content-encoding", "identity"}, {"content-encoding", "gzip"}}));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status, 415);
}

}  // namespace
}  // namespace k3::serve
