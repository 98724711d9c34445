// Keeps web pages of other sites away from a server that trusts everybody on this machine.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "k3/serve/api_error.h"
#include "k3/serve/http.h"

namespace k3::serve {

/// Whether `host`, as a Host field has it (name or address, and perhaps a port of digits), is
/// localhost, 127.0.0.1, [::1] or one of `names`, without regard to case.
bool IsAllowedHost(std::string_view host, const std::vector<std::string>& names);

/// Status 403 for a Host that is not allowed (a name that was made to point here), and for a
/// request other than GET, HEAD and OPTIONS whose Origin is neither such a host nor `cors_origin`
/// ("*": any). A request without these fields does not come from a page and passes.
ApiStatus CheckCaller(const HttpRequest& head, const std::vector<std::string>& names,
                      std::string_view cors_origin);

/// Status 415 unless the body comes as it is.
ApiStatus CheckContentEncoding(const HttpRequest& head);

}  // namespace k3::serve
