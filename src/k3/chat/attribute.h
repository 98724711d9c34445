// The text of an attribute's value in the XTML chat format.
#pragma once

#include <string>
#include <string_view>

namespace k3::chat {

/// & and " as entities; everything else stays.
std::string EscapedAttribute(std::string_view value);

}  // namespace k3::chat
