// One request for text from its submission to the engine to the end of its answer.
#pragma once

#include <functional>
#include <memory>

#include "k3/serve/generation.h"
#include "k3/serve/http.h"
#include "k3/serve/reply_writer.h"
#include "k3/serve/served_model.h"

namespace k3::serve {

/// How a request ended, for metrics and the log.
struct JobReport {
  int status = 200;            // 499: the client left
  const char* outcome = "ok";  // ok, refused, cancelled, failed
  Usage usage;
  double first_token_s = -1;   // from the start; < 0: none came
  double first_answer_s = -1;  // of the answer, after the reasoning
  double total_s = 0;
};

/// Submits every choice to the engine and returns. The writer is told what comes, one thread at a
/// time; `out` says when the client leaves, which cancels every choice. `report` is called once at
/// the end, from any thread. Refused choices refuse the request as a whole.
void StartJob(std::shared_ptr<const ServedModel> model, Generation generation,
              std::unique_ptr<ReplyWriter> writer, const std::shared_ptr<Responder>& out,
              std::string call_id_prefix, std::function<void(const JobReport&)> report);

}  // namespace k3::serve
