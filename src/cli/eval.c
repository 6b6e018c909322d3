// src/cli/eval.c - `tandem eval logits` and `tandem eval perplexity`.
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/json_write.h"
#include "base/log.h"
#include "cli/cli.h"
#include "engine/sampler.h"
#include "runtime/command.h"
#include "runtime/session.h"

// Receives the logits of tokens [begin, begin + n): f32 [n][n_vocab].
typedef td_status (*rows_fn)(void *ctx, float *logits, uint32_t begin, uint32_t n, td_err *err);

// Runs all tokens through the model, at most `chunk` per step, and passes on the logits.
static td_status all_logits(td_session *s, const int32_t *ids, uint32_t n, uint32_t chunk,
                            rows_fn fn, void *ctx, td_err *err) {
  td_status st = td_kv_reserve(s->kv, s->seq, n, err);
  for (uint32_t done = 0; st == TD_OK && done < n;) {
    uint32_t step = n - done < chunk ? n - done : chunk;
    td_step_seq seq = {.tokens = ids + done,
                       .n_tokens = step,
                       .n_past = done,
                       .want = TD_WANT_ALL,
                       .is_decode = chunk == 1};
    seq.pages = td_kv_pages(s->kv, s->seq, &seq.n_pages);
    st = td_engine_step(s->engine, &seq, 1, err);
    if (st == TD_OK) st = fn(ctx, td_engine_logits(s->engine), done, step, err);
    done += step;
  }
  return st;
}

// ---- eval logits ----------------------------------------------------------------------------

typedef struct {
  FILE *file;
  const char *path;
  uint32_t n_vocab;
} npy_out;

static td_status write_error(const char *path, td_err *err) {
  return td_fail(err, TD_EIO, "%s: cannot write: %s", path, strerror(errno));
}

// NumPy format 1.0: the header is padded so that data start at a multiple of 64 bytes.
static td_status write_npy_header(const npy_out *out, uint32_t n_tokens, td_err *err) {
  char header[128], *dict = header + 10;
  memset(header, ' ', sizeof header);
  memcpy(header, "\x93NUMPY\x01\x00", 8);
  header[8] = sizeof header - 10;
  header[9] = 0;
  int n = snprintf(dict, sizeof header - 10,
                   "{'descr': '<f4', 'fortran_order': False, 'shape': (%u, %u), }", n_tokens,
                   out->n_vocab);
  dict[n] = ' ';
  header[sizeof header - 1] = '\n';
  return fwrite(header, sizeof header, 1, out->file) == 1 ? TD_OK : write_error(out->path, err);
}

static td_status write_rows(void *ctx, float *logits, uint32_t begin, uint32_t n, td_err *err) {
  (void)begin;
  npy_out *out = ctx;
  size_t count = (size_t)n * out->n_vocab;
  return fwrite(logits, sizeof *logits, count, out->file) == count ? TD_OK
                                                                   : write_error(out->path, err);
}

static td_status write_logits(td_session *s, const td_options *o, const char *tmp, td_err *err) {
  npy_out out = {.file = fopen(tmp, "wb"), .path = o->out, .n_vocab = s->config->n_vocab};
  if (!out.file) return write_error(tmp, err);
  td_status st = write_npy_header(&out, o->token_ids.n, err);
  if (st == TD_OK) {
    st = all_logits(s, o->token_ids.values, o->token_ids.n, (uint32_t)o->chunk_tokens, write_rows,
                    &out, err);
  }
  if (fclose(out.file) != 0 && st == TD_OK) st = write_error(tmp, err);
  return st;
}

// chunk 0: as given by the options.
static td_status open_session(td_session **out, const td_options *o, uint32_t n_tokens,
                              uint32_t chunk, td_err *err) {
  td_session_opts opts;
  td_status st = td_cmd_session_opts(o, &opts, err);
  if (st != TD_OK) return st;
  opts.runtime.ctx_size = n_tokens;
  if (chunk) opts.runtime.prefill_chunk = chunk;
  return td_session_open(out, &opts, err);
}

int td_cmd_eval_logits(const td_options *o) {
  td_err err;
  if (td_cmd_need_model(o, &err) != TD_OK) return td_cmd_fail(&err);
  if (!o->token_ids.n || !o->out) {
    td_fail(&err, TD_EINVAL, "tandem eval logits needs --token-ids IDS and --out FILE");
    return td_cmd_fail(&err);
  }
  char tmp[4096];
  if (snprintf(tmp, sizeof tmp, "%s.tmp.%d", o->out, (int)getpid()) >= (int)sizeof tmp) {
    td_fail(&err, TD_EINVAL, "--out: the path is too long");
    return td_cmd_fail(&err);
  }
  td_session *s;
  td_status st = open_session(&s, o, o->token_ids.n, (uint32_t)o->chunk_tokens, &err);
  if (st == TD_OK) st = write_logits(s, o, tmp, &err);
  if (st == TD_OK && rename(tmp, o->out) != 0) st = write_error(o->out, &err);
  if (st != TD_OK) unlink(tmp);
  td_session_close(s);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}

// ---- eval perplexity ------------------------------------------------------------------------

typedef struct {
  const int32_t *ids;
  uint32_t n, n_vocab;
  double sum, sum_squares; // of negative log-likelihoods, in nats
  uint32_t count;
} likelihood;

static td_status add_likelihood(void *ctx, float *logits, uint32_t begin, uint32_t n, td_err *err) {
  (void)err;
  likelihood *l = ctx;
  for (uint32_t t = 0; t < n && begin + t + 1 < l->n; t++) {
    const float *row = logits + (size_t)t * l->n_vocab;
    float max = row[0];
    for (uint32_t i = 1; i < l->n_vocab; i++)
      max = fmaxf(max, row[i]);
    double norm = 0;
    for (uint32_t i = 0; i < l->n_vocab; i++)
      norm += exp((double)(row[i] - max));
    double nll = log(norm) + max - row[l->ids[begin + t + 1]];
    l->sum += nll;
    l->sum_squares += nll * nll;
    l->count++;
  }
  return TD_OK;
}

enum { MOST_ROWS = 1024 }; // rows of logits per step

// Scores consecutive windows of the context size, each independently.
static td_status score(td_session *s, const td_token_ids *ids, likelihood *total, td_err *err) {
  *total = (likelihood){.n_vocab = s->config->n_vocab};
  for (size_t at = 0; at + 1 < ids->n; at += s->n_ctx) {
    size_t left = ids->n - at;
    total->ids = ids->ids + at;
    total->n = left < s->n_ctx ? (uint32_t)left : s->n_ctx;
    const uint32_t most = s->opts.runtime.prefill_chunk < MOST_ROWS ? s->opts.runtime.prefill_chunk
                                                                    : MOST_ROWS;
    td_status st = all_logits(s, total->ids, total->n, most, add_likelihood, total, err);
    if (st != TD_OK) return st;
  }
  if (!total->count) return td_fail(err, TD_EINVAL, "--file: the text has fewer than two tokens");
  if (!isfinite(total->sum)) return td_fail(err, TD_EFORMAT, TD_NO_LOGITS);
  return TD_OK;
}

static void print_perplexity(const td_options *o, const likelihood *l, uint32_t window, double s) {
  double mean = l->sum / l->count, variance = fmax(l->sum_squares / l->count - mean * mean, 0);
  double error = exp(mean) * sqrt(variance / l->count);
  if (!o->json) {
    printf("perplexity %.4f +- %.4f over %u tokens, windows of %u\n", exp(mean), error, l->count,
           window);
    td_info("%.2f s, %.1f tokens/s", s, l->count / s);
    return;
  }
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_add(&w,
            "{'perplexity': %g, 'standard_error': %g, 'nll': %g, 'n_tokens': %u, 'window': %u, "
            "'seconds': %g}",
            exp(mean), error, mean, l->count, window, s);
  puts(td_buf_text(&text));
  td_buf_free(&text);
}

int td_cmd_eval_perplexity(const td_options *o) {
  td_err err;
  td_token_ids ids = {0};
  td_session *s = NULL;
  td_status st = td_cmd_read_ids(o, &ids, &err);
  uint32_t window = 0;
  if (st == TD_OK) st = td_cmd_window(o, &window, &err);
  if (ids.n < window) window = ids.n > 2 ? (uint32_t)ids.n : 2;
  if (st == TD_OK) st = open_session(&s, o, window, 0, &err);
  double start = td_clock_s();
  likelihood total;
  if (st == TD_OK) st = score(s, &ids, &total, &err);
  if (st == TD_OK) print_perplexity(o, &total, window, td_clock_s() - start);
  td_session_close(s);
  td_token_ids_free(&ids);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
