#include "k3/serve/state_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "support/engine_fixtures.h"
#include "support/temp_dir.h"

namespace k3::serve {
namespace {

std::unique_ptr<StateFiles> OpenStates(const testing::TempDir& dir, const TokenModel& model,
                                       StateFiles::Limits limits = {}) {
  auto made = StateFiles::Open(dir.path(), limits, model);
  EXPECT_TRUE(made.ok()) << made.message();
  return made.ok() ? std::move(*made) : nullptr;
}

std::vector<SavedSnapshot> OneState(k3::test::HashModel& model, std::int64_t n = 20) {
  Rng rng(7);
  SavedSnapshot s{k3::test::RandomTokens(rng, n, 60), {}};
  s.snapshot.state = model.NewState();
  const SequenceInput input{s.tokens, &s.snapshot.state, LogitRows::kLast};
  EXPECT_TRUE(model.Forward({&input, 1}, s.snapshot.logits).ok());
  std::vector<SavedSnapshot> list;
  list.push_back(std::move(s));
  return list;
}

int StatusOf(const ApiStatus& status) { return status ? status->status : 200; }
std::string CodeOf(const ApiStatus& status) { return status ? status->code : ""; }

TEST(StateFiles, SavesRestoresReplacesAndErases) {
  const testing::TempDir dir;
  k3::test::HashModel model;
  const auto files = OpenStates(dir, model);
  std::int64_t written = 0, read = 0;
  std::vector<SavedSnapshot> list;
  EXPECT_EQ(StatusOf(files->Restore("a.bin", list, read)), 404);
  for (const std::int64_t n : {20, 30}) {
    ASSERT_FALSE(files->Save("a.bin", OneState(model, n), written));
    ASSERT_FALSE(files->Restore("a.bin", list, read));
    EXPECT_EQ(read, written);
    ASSERT_EQ(list.size(), 1u);
    EXPECT_EQ(list[0].tokens.size(), static_cast<std::size_t>(n));
  }
  struct stat st{};
  ASSERT_EQ(::stat((dir / "a.bin").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777u, 0600u);
  EXPECT_EQ(dir.count(), 1) << "nothing is left of the writing";
  EXPECT_FALSE(files->Erase("a.bin", read));
  EXPECT_EQ(StatusOf(files->Erase("a.bin", read)), 404);
  EXPECT_EQ(dir.count(), 0);
}

TEST(StateFiles, NamesLeadNowhere) {
  const testing::TempDir outside, dir;
  k3::test::HashModel model;
  const auto files = OpenStates(dir, model);
  std::int64_t bytes = 0;
  std::vector<SavedSnapshot> list;
  std::vector<std::string> names{
      "",     ".",    "..",  "../a",     "/tmp/a", "a/b", ".a",   "a b",
      "a\nb", "a\\b", "%2e", "\xC3\xA4", "a:b",    "a~",  "-/..", std::string("a\0b", 3)};
  names.push_back(std::string(129, 'a'));
  for (const std::string& name : names) {
    for (const ApiStatus& got :
         {files->CheckTarget(name), files->Save(name, OneState(model), bytes),
          files->Restore(name, list, bytes), files->Erase(name, bytes)}) {
      ASSERT_EQ(StatusOf(got), 400) << name;
      EXPECT_EQ(got->param, "filename");
    }
  }
  EXPECT_FALSE(files->Save(std::string(128, 'a'), OneState(model), bytes));
  EXPECT_FALSE(files->Save("-", OneState(model), bytes));
  EXPECT_EQ(dir.count(), 2);
  EXPECT_EQ(outside.count(), 0);
}

TEST(StateFiles, LinksFoldersPipesAndFilesOfOthersAreLeftAlone) {
  const testing::TempDir outside, dir;
  k3::test::HashModel model;
  const auto files = OpenStates(dir, model);
  std::int64_t bytes = 0;
  ASSERT_FALSE(files->Save("good", OneState(model), bytes));
  // A link to a state that would be valid, one to nothing, and what is no state at all.
  testing::WriteBytes(outside / "state", testing::ReadBytes(dir / "good"));
  const std::string before = testing::ReadBytes(outside / "state");
  std::filesystem::create_symlink(outside / "state", dir / "link");
  std::filesystem::create_symlink(outside / "nothing", dir / "dangling");
  std::filesystem::create_symlink(dir / "good", dir / "inside");
  std::filesystem::create_directory(dir / "folder");
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  testing::WriteBytes(dir / "notes.txt", "notes of the operator");
  testing::WriteBytes(dir / "empty", "");
  const std::ptrdiff_t count = dir.count();
  std::vector<SavedSnapshot> list;
  for (const char* name : {"link", "dangling", "inside", "folder", "pipe", "notes.txt", "empty"}) {
    for (const ApiStatus& got :
         {files->CheckTarget(name), files->Save(name, OneState(model), bytes),
          files->Restore(name, list, bytes), files->Erase(name, bytes)}) {
      EXPECT_EQ(StatusOf(got), 400) << name;
      EXPECT_EQ(CodeOf(got), "invalid_state") << name;
    }
  }
  EXPECT_EQ(dir.count(), count);
  EXPECT_EQ(outside.count(), 1);
  EXPECT_EQ(testing::ReadBytes(outside / "state"), before);
  EXPECT_EQ(testing::ReadBytes(dir / "notes.txt"), "notes of the operator");
}

TEST(StateFiles, DamagedAndForeignStatesAreRefusedAndKept) {
  const testing::TempDir dir;
  k3::test::HashModel model;
  const auto files = OpenStates(dir, model);
  std::int64_t bytes = 0;
  ASSERT_FALSE(files->Save("a", OneState(model), bytes));
  const std::string good = testing::ReadBytes(dir / "a");
  std::string flipped = good;
  flipped[good.size() / 2] = static_cast<char>(flipped[good.size() / 2] ^ 1);
  std::vector<SavedSnapshot> list;
  for (const std::string& bad : {flipped, good.substr(0, good.size() - 1), good.substr(0, 12)}) {
    testing::WriteBytes(dir / "a", bad);
    const ApiStatus got = files->Restore("a", list, bytes);
    EXPECT_EQ(StatusOf(got), 400);
    EXPECT_EQ(CodeOf(got), "invalid_state");
    EXPECT_EQ(got->message.find(dir.path()), std::string::npos)
        << "the folder is nobody's business";
    EXPECT_TRUE(list.empty());
    EXPECT_EQ(testing::ReadBytes(dir / "a"), bad);
  }
  testing::WriteBytes(dir / "a", good);
  model.print = 2;
  const ApiStatus other = files->Restore("a", list, bytes);
  ASSERT_TRUE(other);
  EXPECT_NE(other->message.find("another model"), std::string::npos) << other->message;
  model.print = 1;
  EXPECT_FALSE(files->Restore("a", list, bytes));
}

TEST(StateFiles, TheFolderHasLimits) {
  const testing::TempDir dir;
  k3::test::HashModel model;
  std::int64_t one = 0, bytes = 0;
  {
    const auto files = OpenStates(dir, model);
    ASSERT_FALSE(files->Save("a", OneState(model), one));
  }
  {
    const auto files = OpenStates(dir, model, {2 * one - 1, 1024});
    EXPECT_FALSE(files->Save("a", OneState(model), bytes)) << "what is replaced does not count";
    const ApiStatus full = files->Save("b", OneState(model), bytes);
    EXPECT_EQ(StatusOf(full), 400);
    EXPECT_EQ(CodeOf(full), "state_dir_full");
    EXPECT_NE(full->message.find("--state-dir-limit"), std::string::npos);
    testing::WriteBytes(dir / ".hidden", std::string(static_cast<std::size_t>(one), 'x'));
    EXPECT_EQ(CodeOf(files->Save("a", OneState(model), bytes)), "state_dir_full")
        << "files of others count";
    std::filesystem::remove(dir / ".hidden");
  }
  const auto files = OpenStates(dir, model, {100 * one, 2});
  EXPECT_FALSE(files->Save("b", OneState(model), bytes));
  EXPECT_FALSE(files->Save("b", OneState(model), bytes));
  EXPECT_EQ(CodeOf(files->Save("c", OneState(model), bytes)), "state_dir_full");
  EXPECT_EQ(CodeOf(files->CheckTarget("c")), "state_dir_full") << "known before anything is read";
  EXPECT_EQ(dir.count(), 2);
  EXPECT_FALSE(StateFiles::Open(dir / "nowhere", {}, model).ok());
  EXPECT_FALSE(StateFiles::Open(dir / "a", {}, model).ok());
}

TEST(StateFiles, DoesWhatWasPostedBeforeItEnds) {
  const testing::TempDir dir;
  k3::test::HashModel model;
  std::atomic<bool> go{false};
  int done = 0, taken = 0;
  {
    const auto files = OpenStates(dir, model);
    const auto task = [&] {
      while (!go) std::this_thread::yield();
      ++done;
    };
    while (files->Post(task)) ASSERT_LE(++taken, 6) << "the queue ends";
    EXPECT_GE(taken, 4);
    go = true;
  }
  EXPECT_EQ(done, taken);
}

TEST(StateFiles, StaysInTheFolderThatWasOpened) {
  namespace fs = std::filesystem;
  const testing::TempDir dir;
  k3::test::HashModel model;
  const std::string folder = dir / "states", moved = dir / "moved";
  fs::create_directory(folder);
  auto made = StateFiles::Open(folder, {}, model);
  ASSERT_TRUE(made.ok()) << made.message();
  fs::rename(folder, moved);
  fs::create_directory(folder);
  std::int64_t bytes = 0;
  std::vector<SavedSnapshot> list;
  EXPECT_FALSE((*made)->Save("a.bin", OneState(model), bytes));
  EXPECT_FALSE((*made)->Restore("a.bin", list, bytes));
  EXPECT_TRUE(fs::exists(moved + "/a.bin"));
  EXPECT_TRUE(fs::is_empty(folder));
  EXPECT_FALSE((*made)->Erase("a.bin", bytes));
  EXPECT_TRUE(fs::is_empty(moved));
  fs::remove(moved);
  EXPECT_EQ(StatusOf((*made)->Save("a.bin", OneState(model), bytes)), 500);
  EXPECT_TRUE(fs::is_empty(folder));
}

TEST(StateFiles, ALinkThatAppearsMeanwhileLeadsNowhere) {
  namespace fs = std::filesystem;
  const testing::TempDir dir;
  k3::test::HashModel model;
  const std::string folder = dir / "states", outside = dir / "outside";
  fs::create_directory(folder);
  std::ofstream(outside) << "untouched";
  auto made = StateFiles::Open(folder, {}, model);
  ASSERT_TRUE(made.ok()) << made.message();
  const std::vector<SavedSnapshot> list = OneState(model);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    const std::string link = folder + "/a.bin";
    while (!stop) {
      std::error_code ignored;
      fs::create_symlink(outside, link, ignored);
      fs::remove(link, ignored);
    }
  });
  std::int64_t bytes = 0;
  const auto untouched = [&] {
    return fs::file_size(outside) == std::string_view("untouched").size();
  };
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  while (untouched() && std::chrono::steady_clock::now() < end) {
    (void)(*made)->Save("a.bin", list, bytes);
  }
  stop = true;
  other.join();
  EXPECT_TRUE(untouched());
}

TEST(StateFiles, AFileAboveTheLimitIsRefused) {
  const testing::TempDir dir;
  k3::test::HashModel model;
  std::int64_t bytes = 0;
  std::vector<SavedSnapshot> list;
  ASSERT_FALSE(OpenStates(dir, model)->Save("a.bin", OneState(model), bytes));
  const auto small = OpenStates(dir, model, {.bytes = bytes - 1});
  const ApiStatus refused = small->Restore("a.bin", list, bytes);
  EXPECT_EQ(StatusOf(refused), 400);
  EXPECT_EQ(CodeOf(refused), "invalid_state");
  EXPECT_FALSE(small->Erase("a.bin", bytes));
}

}  // namespace
}  // namespace k3::serve
