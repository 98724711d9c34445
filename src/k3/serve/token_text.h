// Tokens and their log-probabilities in JSON.
#pragma once

#include <string>
#include <vector>

#include "k3/runtime/sampler.h"
#include "k3/serve/json_out.h"
#include "k3/tokenizer/tokenizer.h"

namespace k3::serve {

/// The "content" list of a chat's logprobs: token, logprob, bytes, top_logprobs.
Json ChatLogprobs(const std::vector<SampleResult>& tokens, const Tokenizer& tokenizer);

/// The text of a token where it must name it: "bytes:\xe2\x82" when it is not UTF-8 by itself.
std::string TokenName(TokenId id, const Tokenizer& tokenizer);

}  // namespace k3::serve
