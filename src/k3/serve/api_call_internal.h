// Shared by the files that implement Api.
#pragma once

#include <memory>
#include <string_view>

#include "k3/serve/api.h"

namespace k3::serve {

struct Api::Call {
  HttpRequest request;
  std::shared_ptr<Responder> out;
  std::shared_ptr<const ServedModel> model;  // null unless the route needs it
};

struct Api::Route {
  std::string_view path;  // with '/' at its end: what begins with it
  std::string_view method;
  ApiStatus (Api::*handle)(Call&);  // an error is sent by the caller
  bool needs_model;
};

}  // namespace k3::serve
