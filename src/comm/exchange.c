// src/comm/exchange.c - a model of what expert parallelism sends between ranks.
#include "comm/exchange.h"

// What a rank gets of `row` elements in BF16 of every token that is not its own.
static uint64_t received(const td_exchange_layer *l, uint64_t row) {
  const uint64_t own = l->n_tokens / l->n_ranks;
  return (l->n_tokens - own) * row * sizeof(uint16_t);
}

td_exchange_bytes td_exchange_bytes_of(const td_exchange_layer *l) {
  td_exchange_bytes b = {.kv_bytes = received(l, l->kv_elements)};
  if (!l->expert_bytes) return b;
  b.hidden_bytes = received(l, l->dim);
  b.sum_bytes = (uint64_t)(l->n_ranks - 1) * (l->n_tokens / l->n_ranks) * l->dim * sizeof(uint16_t);
  b.expert_bytes = (l->expert_bytes + l->n_ranks - 1) / l->n_ranks;
  return b;
}

td_exchange_time td_exchange_time_of(const td_exchange_bytes *b, const td_exchange_links *links) {
  const double sent = (double)b->kv_bytes + (double)b->hidden_bytes + (double)b->sum_bytes;
  td_exchange_time t = {.exchange_s = sent / (links->rank_gbps * 1e9),
                        .stream_s = (double)b->expert_bytes / (links->stream_gbps * 1e9)};
  const double longer = t.exchange_s > t.stream_s ? t.exchange_s : t.stream_s;
  t.layer_s = links->is_same_link ? t.exchange_s + t.stream_s : longer;
  return t;
}
