#include "k3/model/model_state.h"

#include <cstring>

#include <fmt/format.h>

namespace k3 {
namespace {

struct Sizes {
  std::int64_t state, conv;  // floats of a KDA layer
  std::int64_t row, value;   // floats a token of a softmax layer
};

Sizes SizesOf(const ModelConfig& c, std::int64_t layer) {
  switch (c.attention[static_cast<std::size_t>(layer)]) {
    case AttentionKind::kKda:
      return {c.kda.width() * c.kda.head_dim, 3 * (c.kda.conv_kernel - 1) * c.kda.width(), 0, 0};
    case AttentionKind::kMla:
      return {0, 0, c.mla.row_dim(), 0};
    case AttentionKind::kGqa: {
      const std::int64_t width = c.gqa.n_kv_heads * c.gqa.head_dim;
      return {0, 0, width, width};
    }
  }
  return {};
}

void Append(std::string& out, const void* data, std::int64_t bytes) {
  out.append(static_cast<const char*>(data), static_cast<std::size_t>(bytes));
}

}  // namespace

ModelState::ModelState(const ModelConfig& config) {
  for (std::int64_t i = 0; i < config.n_layers; ++i) {
    const Sizes s = SizesOf(config, i);
    LayerCache cache;
    cache.kda.state.assign(static_cast<std::size_t>(s.state), 0.f);
    cache.kda.conv.assign(static_cast<std::size_t>(s.conv), 0.f);
    cache.rows = PagedRows(s.row);
    cache.value_rows = PagedRows(s.value);
    layers_.push_back(std::move(cache));
  }
}

std::int64_t ModelState::bytes() const {
  std::int64_t sum = 0;
  for (const LayerCache& l : layers_) {
    sum += static_cast<std::int64_t>(4 * (l.kda.state.size() + l.kda.conv.size()));
    sum += l.rows.bytes() + l.value_rows.bytes();
  }
  return sum;
}

StateBytes ModelState::PartsFor(const ModelConfig& config, std::int64_t tokens) {
  const std::int64_t rows =
      (tokens + PagedRows::kPageRows - 1) / PagedRows::kPageRows * PagedRows::kPageRows;
  StateBytes sum;
  for (std::int64_t i = 0; i < config.n_layers; ++i) {
    const Sizes s = SizesOf(config, i);
    sum.kda += 4 * s.state;
    sum.conv += 4 * s.conv;
    const bool mla = config.attention[static_cast<std::size_t>(i)] == AttentionKind::kMla;
    (mla ? sum.mla : sum.gqa) += 4 * rows * (s.row + s.value);
    sum.row_token += s.row + s.value;
  }
  return sum;
}

// Image: i64 position, then for every layer its KDA state and tails, then `position` rows of keys
// and of values. Everything little-endian; the widths come from the model, not from the image.
std::string ModelState::Serialize() const {
  std::string out;
  Append(out, &position_, 8);
  for (const LayerCache& l : layers_) {
    Append(out, l.kda.state.data(), static_cast<std::int64_t>(4 * l.kda.state.size()));
    Append(out, l.kda.conv.data(), static_cast<std::int64_t>(4 * l.kda.conv.size()));
    for (const PagedRows* rows : {&l.rows, &l.value_rows}) {
      for (std::int64_t i = 0; rows->width() > 0 && i < rows->size(); ++i) {
        Append(out, rows->row(i), 4 * rows->width());
      }
    }
  }
  return out;
}

Status ModelState::Deserialize(std::string_view image) {
  std::int64_t position = 0;
  if (image.size() < 8) return Error{Code::kCorrupt, "state image shorter than its position"};
  std::memcpy(&position, image.data(), 8);
  std::int64_t fixed = 8, per_token = 0;
  for (const LayerCache& l : layers_) {
    fixed += static_cast<std::int64_t>(4 * (l.kda.state.size() + l.kda.conv.size()));
    per_token += 4 * (l.rows.width() + l.value_rows.width());
  }
  const auto size = static_cast<std::int64_t>(image.size());
  const std::int64_t limit = per_token > 0 ? (size - fixed) / per_token : std::int64_t{1} << 40;
  if (position < 0 || size < fixed || position > limit || fixed + position * per_token != size) {
    return Error{
        Code::kCorrupt,
        fmt::format("state image of {} bytes at position {}: expected {} bytes and {} a token",
                    size, position, fixed, per_token)};
  }
  const char* at = image.data() + 8;
  auto take = [&](void* to, std::int64_t bytes) {
    std::memcpy(to, at, static_cast<std::size_t>(bytes));
    at += bytes;
  };
  ModelState fresh = *this;
  for (LayerCache& l : fresh.layers_) {
    for (std::vector<float>* part : {&l.kda.state, &l.kda.conv}) {
      if (!part->empty()) take(part->data(), static_cast<std::int64_t>(4 * part->size()));
    }
    for (PagedRows* rows : {&l.rows, &l.value_rows}) {
      if (rows->width() == 0) continue;
      rows->Truncate(0);
      rows->Grow(position);
      for (std::int64_t i = 0; i < position; ++i) take(rows->MutableRow(i), 4 * rows->width());
    }
  }
  fresh.position_ = position;
  *this = std::move(fresh);
  return {};
}

}  // namespace k3
