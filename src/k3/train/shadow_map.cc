#include "k3/train/shadow_map.h"

#include <algorithm>

#include "k3/base/check.h"

namespace k3 {

void ShadowMap::AddParameter(const float* data, std::int64_t n, float* shadow) {
  ranges_[data] = Range{n, shadow, Kind::kParameter, {}};
}

void ShadowMap::AddScratch(const float* data, std::int64_t n) {
  Range r{n, nullptr, Kind::kScratch, {}};
  if (!spare_.empty()) {
    r.owned = std::move(spare_.back());
    spare_.pop_back();
  }
  r.owned.assign(static_cast<std::size_t>(n), 0.f);
  r.shadow = r.owned.data();
  ranges_[data] = std::move(r);
}

void ShadowMap::AddTransient(const float* data, std::int64_t n) {
  if (const auto it = ranges_.find(data); it != ranges_.end()) {
    K3_CHECK(it->second.n == n, "a range keeps its size");
    return;
  }
  Range r{n, nullptr, Kind::kTransient, std::vector<float>(static_cast<std::size_t>(n))};
  const auto at = ranges_.emplace(data, std::move(r)).first;
  at->second.shadow = at->second.owned.data();
}

void ShadowMap::ClearPass() {
  spare_.clear();
  for (auto& [data, r] : ranges_) {
    if (r.kind == Kind::kScratch) spare_.push_back(std::move(r.owned));
  }
  std::erase_if(ranges_, [](const auto& r) { return r.second.kind != Kind::kParameter; });
}

const std::pair<const float* const, ShadowMap::Range>* ShadowMap::Holder(const float* p) const {
  auto it = ranges_.upper_bound(p);
  if (it == ranges_.begin()) return nullptr;
  --it;
  return p < it->first + it->second.n ? &*it : nullptr;
}

float* ShadowMap::Find(const float* p, std::int64_t n) const {
  const auto* r = p == nullptr ? nullptr : Holder(p);
  if (r == nullptr) return nullptr;
  const std::int64_t offset = p - r->first;
  K3_CHECK(offset + n <= r->second.n, "an array lies in one range");
  return r->second.shadow + offset;
}

bool ShadowMap::IsParameter(const float* p) const {
  const auto* r = Holder(p);
  return r != nullptr && r->second.kind == Kind::kParameter;
}

std::int64_t ShadowMap::bytes() const {
  std::int64_t n = 0;
  for (const auto& [data, r] : ranges_) n += static_cast<std::int64_t>(r.owned.size()) * 4;
  return n;
}

}  // namespace k3
