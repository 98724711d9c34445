#include "k3/chat/message.h"

namespace k3::chat {

std::string_view Name(Role role) {
  switch (role) {
    case Role::kSystem:
      return "system";
    case Role::kUser:
      return "user";
    case Role::kAssistant:
      return "assistant";
    case Role::kTool:
      return "tool";
  }
  return "";
}

std::string_view Name(Effort effort) {
  switch (effort) {
    case Effort::kLow:
      return "low";
    case Effort::kMedium:
      return "medium";
    case Effort::kHigh:
      return "high";
    case Effort::kMax:
      return "max";
  }
  return "";
}

std::optional<Effort> ParseEffort(std::string_view name) {
  for (const Effort e : {Effort::kLow, Effort::kMedium, Effort::kHigh, Effort::kMax}) {
    if (name == Name(e)) return e;
  }
  return std::nullopt;
}

}  // namespace k3::chat
