// tests/fuzz/fuzz_tokenizer.c - a hostile tokenizer.json or tiktoken.model and a text for it. The
// input is the file, JSON where it begins with '{', a NUL, and the text; its first byte chooses
// flags and a literal span. Decoding what was encoded, at once and as a stream, must agree.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/tokenizer/tokenizer.h"

// Patterns may be as slow as their limits allow; on short texts that is still fast.
#define MAX_TEXT 256

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void decode_both_ways(const td_tokenizer *tok, const td_token_ids *ids) {
  td_buf whole = TD_BUF_INIT, stream = TD_BUF_INIT;
  td_detok detok;
  td_detok_init(&detok, tok, false);
  TD_CHECK(td_tokenizer_decode(tok, ids->ids, ids->n, false, &whole, NULL) == TD_OK);
  for (size_t i = 0; i < ids->n; i++) {
    TD_CHECK(td_detok_feed(&detok, ids->ids[i], &stream, NULL) == TD_OK);
    TD_CHECK(td_utf8_valid(td_buf_text(&stream), stream.len));
  }
  TD_CHECK(td_detok_flush(&detok, &stream, NULL) == TD_OK);
  TD_CHECK(whole.len == stream.len);
  TD_CHECK(memcmp(td_buf_text(&whole), td_buf_text(&stream), whole.len) == 0);
  td_detok_free(&detok);
  td_buf_free(&whole);
  td_buf_free(&stream);
}

static void encode(const td_tokenizer *tok, const uint8_t *data, size_t size) {
  if (!size) return;
  unsigned flags = data[0] & 3;
  size_t begin = data[0] >> 2, len = size - 1;
  if (len > MAX_TEXT) len = MAX_TEXT;
  td_span span = {begin, begin + 4};
  td_spans literal = {.spans = &span, .n = span.end <= len, .cap = 1};
  td_token_ids ids = {0};
  td_err err;
  if (td_tokenizer_encode_spans(tok, (const char *)data + 1, len, &literal, flags, &ids, &err) ==
      TD_OK) {
    for (size_t i = 0; i < ids.n; i++)
      TD_CHECK(ids.ids[i] >= 0 && ids.ids[i] < td_tokenizer_size(tok));
    decode_both_ways(tok, &ids);
  }
  td_token_ids_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const uint8_t *end = memchr(data, 0, size);
  size_t n_file = end ? (size_t)(end - data) : size;
  td_tokenizer *tok;
  td_err err;
  bool is_json = size && data[0] == '{';
  td_status st = (is_json ? td_tokenizer_open_json : td_tokenizer_open_ranks)(
      &tok, "fuzz", (const char *)data, n_file, NULL, 0, &err);
  if (st != TD_OK) return 0;
  if (end) encode(tok, end + 1, size - n_file - 1);
  td_tokenizer_close(tok);
  return 0;
}
