// What the shapes of a model prove about its design, each statement with its evidence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "k3/model/inventory.h"

namespace k3 {

/// What a statement rests on. Only kShapes is proved by the weights; with an inventory whose shapes
/// the config implies, it is proved by tensor names at most.
enum class Basis : std::uint8_t { kShapes, kNames, kConfig };
std::string_view Name(Basis basis);  // "shapes", "tensor names", "config"

struct Finding {
  std::string topic;  // "attention", "key-value compression", ...: stable, for scripts
  std::string text;   // one line
  Basis basis = Basis::kShapes;
  std::string evidence;  // the tensors, or the config keys
};

std::vector<Finding> FindFacts(const Inventory& inventory);

/// Questions that neither names nor shapes answer, with what the config says where it says
/// anything.
std::vector<std::string> CannotBeKnown(const Inventory& inventory);

/// How two inventories differ, as lines "- ..." (only in a) and "+ ..." (only in b) under headings;
/// empty when they hold the same tensors and the same settings.
std::vector<std::string> DiffInventories(const Inventory& a, const Inventory& b);

}  // namespace k3
