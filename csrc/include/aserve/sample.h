// Drawing the next token of each row from its logits. A row's draw depends on that row alone.
//
// In this order: mask and bias, repetition, frequency and presence penalty, bans; temperature;
// top_k, top_p, min_p. Each of the three keeps every logit at or above a threshold, so equal logits
// stay or go together. Then argmax of logit / temperature + gumbel(key, token).
#pragma once

#include <cstdint>

#include "aserve/team.h"

namespace aserve {

enum class Drawn : int32_t { token = 0, not_a_number = 1, none_left = 2 };

struct DrawRow {
  const float* logits;   // [vocab]
  const uint32_t* mask;  // bit per id, ceil(vocab / 32) words; null: every id
  // Ids outside the vocabulary are ignored in the three lists.
  const int32_t* bias_ids;
  const double* bias;
  int64_t bias_n;
  const int32_t* seen_ids;  // distinct ids of the text so far
  const int32_t* seen;      // how often each was generated; 0: in the prompt only
  int64_t seen_n;
  const int32_t* banned;
  int64_t banned_n;
  double temperature, top_p, min_p;
  double presence, frequency, repetition;
  int64_t top_k;  // 0: all
  uint64_t key;   // of core/noise.py
  Drawn status;   // out, as the next
  int64_t token;
};
void draw(Team* team, int64_t vocab, DrawRow* rows, int64_t n);

// Natural log of the softmax over the raw logits: of `token` and of the `top_n` best, best first and
// the lower id first among equals. `ok` is false if a logit is NaN or all are -inf.
struct LogprobRow {
  const float* logits;
  int64_t token;
  int64_t top_n;      // 0..vocab
  double logprob;     // out, as the next
  int32_t* top_ids;   // [top_n]
  double* top_logprobs;
  bool ok;
};
void logprobs(Team* team, int64_t vocab, LogprobRow* rows, int64_t n);

}  // namespace aserve
