// String formats as patterns.
#include <array>
#include <utility>

#include "k3/grammar/pattern.h"

// Days exist in their month, leap years included; years have four digits and start in 1000.
#define K3_DATE                                                                                    \
  "([1-9]\\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|"         \
  "02-(0[1-9]|1\\d|2[0-8]))|([1-9]\\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)" \
  "-02-29)"
#define K3_TIME "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
#define K3_BYTE "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define K3_LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

namespace k3::grammar {

std::string_view FormatPattern(std::string_view format) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 10> kPatterns{{
      {"date", "^" K3_DATE "$"},
      {"date-time", "^" K3_DATE "T" K3_TIME "$"},
      {"time", "^" K3_TIME "$"},
      {"duration",
       "^P(\\d{1,4}W|((\\d{1,4}Y(\\d{1,4}M(\\d{1,4}D)?)?|\\d{1,4}M(\\d{1,4}D)?|\\d{1,4}D)"
       "(T(\\d{1,4}H(\\d{1,4}M(\\d{1,4}S)?)?|\\d{1,4}M(\\d{1,4}S)?|\\d{1,4}S))?"
       "|T(\\d{1,4}H(\\d{1,4}M(\\d{1,4}S)?)?|\\d{1,4}M(\\d{1,4}S)?|\\d{1,4}S)))$"},
      {"email",
       "^[A-Za-z0-9_%+-]+(\\.[A-Za-z0-9_%+-]+){0,8}@(" K3_LABEL "\\.){1,8}[A-Za-z]{2,24}$"},
      {"hostname", "^" K3_LABEL "(\\." K3_LABEL "){0,2}$"},
      {"ipv4", "^(" K3_BYTE "\\.){3}" K3_BYTE "$"},
      {"ipv6", "^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$"},
      {"uri",
       "^[a-z][a-z0-9+.-]{0,20}://[A-Za-z0-9._~%-]+(:\\d{1,5})?(/[A-Za-z0-9._~%!$&'()*+,;=:@-]*)*"
       "(\\?[A-Za-z0-9._~%!$&'()*+,;=:@/?-]*)?(#[A-Za-z0-9._~%!$&'()*+,;=:@/?-]*)?$"},
      {"uuid", "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
  }};
  for (const auto& [name, pattern] : kPatterns) {
    if (name == format) return pattern;
  }
  return {};
}

}  // namespace k3::grammar
