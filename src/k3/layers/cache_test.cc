#include "k3/layers/cache.h"

#include <gtest/gtest.h>

namespace k3 {
namespace {

void Fill(PagedRows& rows, std::int64_t from, float value) {
  for (std::int64_t i = from; i < rows.size(); ++i) {
    for (std::int64_t d = 0; d < rows.width(); ++d) rows.MutableRow(i)[d] = value;
  }
}

void Append(PagedRows& rows, std::int64_t n, float value) {
  const std::int64_t from = rows.size();
  rows.Grow(n);
  Fill(rows, from, value);
}

TEST(PagedRows, TwoOwnersOfAPageDoNotSeeEachOthersRows) {
  for (const std::int64_t before : {std::int64_t{1}, PagedRows::kPageRows - 1, PagedRows::kPageRows,
                                    PagedRows::kPageRows + 1}) {
    PagedRows a(3);
    Append(a, before, 1.f);
    PagedRows b = a;
    Append(a, 2, 2.f);
    Append(b, 2, 3.f);
    for (std::int64_t d = 0; d < 3; ++d) {
      EXPECT_EQ(a.row(0)[d], 1.f);
      EXPECT_EQ(b.row(before - 1)[d], 1.f) << "the last row before the fork, " << before;
      EXPECT_EQ(a.row(before)[d], 2.f);
      EXPECT_EQ(a.row(before + 1)[d], 2.f);
      EXPECT_EQ(b.row(before)[d], 3.f);
      EXPECT_EQ(b.row(before + 1)[d], 3.f);
    }
  }
}

TEST(PagedRows, RowsThatWereCutOffLeaveNoPages) {
  const std::int64_t page = PagedRows::kPageRows;
  PagedRows rows(2);
  Append(rows, 3 * page, 1.f);
  for (const std::int64_t n : {2 * page + 1, 2 * page, page - 1, std::int64_t{0}}) {
    rows.Truncate(n);
    EXPECT_EQ(rows.size(), n);
    EXPECT_EQ(static_cast<std::int64_t>(rows.PageTable().size()), (n + page - 1) / page);
  }
  Append(rows, 1, 2.f);
  EXPECT_EQ(rows.row(0)[1], 2.f);
}

}  // namespace
}  // namespace k3
