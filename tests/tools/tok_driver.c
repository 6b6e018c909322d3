// tests/tools/tok_driver.c - the tokenizer on many strings at once, for tests/e2e.
// usage: tok_driver MODEL_DIR encode FLAGS      records of text in, records of ids out
//        tok_driver MODEL_DIR decode SKIP       records of ids in, records of text out
//        tok_driver MODEL_DIR stream SKIP       the same through td_detok, checking every piece
//        tok_driver MODEL_DIR bench FLAGS       all of stdin as one text; prints MB/s of CPU time
// A record is its size in bytes (uint32, this machine's order) and the bytes; ids are int32.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/fs.h"
#include "base/utf8.h"
#include "text/tokenizer/tokenizer.h"

#define MAX_INPUT ((size_t)1 << 30)

static void check(td_status status, const td_err *err) {
  if (status == TD_OK) return;
  fprintf(stderr, "%d: %s\n", (int)status, err->msg);
  exit(1);
}

static void put_record(const void *bytes, size_t len) {
  uint32_t n = (uint32_t)len;
  fwrite(&n, sizeof n, 1, stdout);
  if (len) fwrite(bytes, 1, len, stdout);
}

static void encode(const td_tokenizer *tok, const char *text, size_t len, unsigned flags) {
  td_token_ids ids = {0};
  td_err err;
  check(td_tokenizer_encode(tok, text, len, flags, &ids, &err), &err);
  put_record(ids.ids, ids.n * sizeof *ids.ids);
  td_token_ids_free(&ids);
}

static void decode(const td_tokenizer *tok, const int32_t *ids, size_t n, bool skip, bool stream) {
  td_buf text = TD_BUF_INIT;
  td_err err;
  if (stream) {
    td_detok detok;
    td_detok_init(&detok, tok, skip);
    for (size_t i = 0; i < n; i++) {
      size_t before = text.len;
      check(td_detok_feed(&detok, ids[i], &text, &err), &err);
      if (!td_utf8_valid(td_buf_text(&text) + before, text.len - before)) {
        fprintf(stderr, "token %d gave a piece of a character\n", ids[i]);
        exit(1);
      }
    }
    check(td_detok_flush(&detok, &text, &err), &err);
    td_detok_free(&detok);
  } else {
    check(td_tokenizer_decode(tok, ids, n, skip, &text, &err), &err);
  }
  put_record(td_buf_text(&text), text.len);
  td_buf_free(&text);
}

// Processor time, so that a busy machine does not make the tokenizer look slow.
static double cpu_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void bench(const td_tokenizer *tok, const td_buf *input, unsigned flags) {
  double best = 0;
  size_t n_ids = 0;
  for (int round = 0; round < 5; round++) {
    td_token_ids ids = {0};
    td_err err;
    double start = cpu_s();
    check(td_tokenizer_encode(tok, td_buf_text(input), input->len, flags, &ids, &err), &err);
    double mb_s = (double)input->len / 1e6 / (cpu_s() - start);
    if (mb_s > best) best = mb_s;
    n_ids = ids.n;
    td_token_ids_free(&ids);
  }
  printf("%.2f MB, %zu tokens, %.1f MB/s\n", (double)input->len / 1e6, n_ids, best);
}

static void run_records(const td_tokenizer *tok, const char *mode, unsigned option,
                        const td_buf *input) {
  for (size_t pos = 0; pos + sizeof(uint32_t) <= input->len;) {
    uint32_t len;
    memcpy(&len, input->data + pos, sizeof len);
    pos += sizeof len;
    if (len > input->len - pos) {
      fprintf(stderr, "a record is cut short\n");
      exit(1);
    }
    // A copy of its own lets sanitizers see reads past the end.
    char *record = malloc(len ? len : 1);
    if (!record) exit(1);
    memcpy(record, input->data + pos, len);
    if (strcmp(mode, "encode") == 0) {
      encode(tok, record, len, option);
    } else {
      decode(tok, (const int32_t *)(const void *)record, len / sizeof(int32_t), option != 0,
             strcmp(mode, "stream") == 0);
    }
    free(record);
    pos += len;
  }
}

int main(int argc, char **argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s MODEL_DIR encode|decode|stream|bench OPTION\n", argv[0]);
    return 2;
  }
  td_err err;
  td_tokenizer *tok;
  td_buf input = TD_BUF_INIT;
  double start = cpu_s();
  check(td_tokenizer_open(&tok, argv[1], &err), &err);
  double load_s = cpu_s() - start;
  check(td_stdin_read(&input, MAX_INPUT, &err), &err);
  unsigned option = (unsigned)strtoul(argv[3], NULL, 10);
  if (strcmp(argv[2], "bench") == 0) {
    printf("loaded in %.0f ms; ", load_s * 1e3);
    bench(tok, &input, option);
  } else {
    run_records(tok, argv[2], option, &input);
  }
  td_buf_free(&input);
  td_tokenizer_close(tok);
  return 0;
}
