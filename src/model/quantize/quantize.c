// src/model/quantize/quantize.c - td_quantize: checks source and output, then makes shard after
// shard.
#include "model/quantize/quantize.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/grow.h"
#include "gguf/files.h"
#include "model/quantize/quantize_impl.h"
#include "tandem/kernels.h"

char *td_quantize_path(const char *dir, const char *file) {
  char *path;
  return asprintf(&path, "%s/%s", dir, file) < 0 ? NULL : path;
}

td_status td_quantize_no_memory(const td_quantizer *q) {
  return td_fail(q->err, TD_ENOMEM, "%s: out of memory", q->opts->out);
}

td_status td_quantize_note(td_quantizer *q, const char *name, size_t len, uint64_t rows,
                           uint64_t cols, double error) {
  td_quantize_report *r = q->report;
  if (!TD_GROW(r->tensors, r->n_tensors, r->cap_tensors, 64)) return td_quantize_no_memory(q);
  char *copy = strndup(name, len);
  if (!copy) return td_quantize_no_memory(q);
  r->tensors[r->n_tensors++] = (td_quantized){copy, rows, cols, error};
  return TD_OK;
}

void td_quantize_report_free(td_quantize_report *report) {
  for (size_t i = 0; i < report->n_tensors; i++)
    free(report->tensors[i].name);
  free(report->tensors);
  *report = (td_quantize_report){0};
}

// Checks the whole source as td_model_open does, and that its weights can be encoded.
static td_status check_source(const td_quantize_opts *opts, td_model_config *config, td_err *err) {
  td_model *model;
  td_status st = td_model_open_shapes(&model, opts->in, err);
  if (st != TD_OK) return st;
  *config = *td_model_config_of(model);
  td_model_stats stats = td_model_stats_of(model);
  td_model_close(model);
  static const td_dtype small[] = {TD_I4, TD_F4E2M1, TD_I8};
  for (size_t i = 0; i < TD_COUNT(small); i++) {
    if (!stats.bytes_by_dtype[small[i]]) continue;
    return td_fail(err, TD_EUNSUPPORTED,
                   "%s: has weights of dtype %s already; give a checkpoint in BF16 or FP8",
                   opts->in, td_dtype_name(small[i]));
  }
  return TD_OK;
}

// Creates the output directory, locks it, and rejects one that already holds a checkpoint.
static td_status claim_output(const td_quantize_opts *opts, int *lock, td_err *err) {
  static const char *const finished[] = {TD_QUANTIZE_INDEX, TD_QUANTIZE_SINGLE};
  if (mkdir(opts->out, 0777) != 0 && errno != EEXIST)
    return td_fail(err, TD_EIO, "%s: cannot make the directory: %s", opts->out, strerror(errno));
  for (size_t i = 0; i < TD_COUNT(finished); i++) {
    char *path = td_quantize_path(opts->out, finished[i]);
    bool there = path && td_file_exists(path);
    free(path);
    if (!path) return td_fail(err, TD_ENOMEM, "%s: out of memory", opts->out);
    if (there) {
      return td_fail(err, TD_EINVAL, "%s: holds a checkpoint already: give another directory",
                     opts->out);
    }
  }
  *lock = open(opts->out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (*lock < 0) return td_fail(err, TD_EIO, "%s: %s", opts->out, strerror(errno));
  if (flock(*lock, LOCK_EX | LOCK_NB) != 0)
    return td_fail(err, TD_EAGAIN, "%s: another process is writing to it", opts->out);
  return TD_OK;
}

static td_status run(td_quantizer *q) {
  const td_quantize_opts *opts = q->opts;
  if (td_gguf_is(opts->in)) {
    return td_fail(q->err, TD_EUNSUPPORTED,
                   "%s: GGUF files are not quantized again: give the checkpoint as published",
                   opts->in);
  }
  td_kernels_init_any();
  td_status st = td_quant_open_dir(&q->quant, opts->in, q->err);
  if (st == TD_OK) st = td_store_open(&q->store, opts->in, q->err);
  if (st == TD_OK) td_settle_names(&q->config, q->store);
  if (st == TD_OK) st = td_quantize_plan(q);
  for (size_t i = 0; i < q->n_shards && st == TD_OK; i++)
    st = td_quantize_shard_make(q, i);
  return st == TD_OK ? td_quantize_finish(q) : st;
}

td_status td_quantize(const td_quantize_opts *opts, td_quantize_report *report, td_err *err) {
  td_err local;
  if (!err) err = &local;
  *report = (td_quantize_report){0};
  td_quantize_opts own = *opts;
  char *in = realpath(opts->in, NULL); // recorded in finished shards as their source
  if (!in)
    return td_fail(err, errno == ENOMEM ? TD_ENOMEM : TD_ENOENT, "%s: %s", opts->in,
                   strerror(errno));
  own.in = in;
  td_quantizer q = {.opts = &own, .report = report, .err = err};
  int lock = -1;
  td_status st = check_source(&own, &q.config, err);
  if (st == TD_OK) st = claim_output(&own, &lock, err);
  if (st == TD_OK) st = run(&q);
  td_quantize_plan_free(&q);
  td_binding_free(&q.binding);
  td_quant_close(q.quant);
  td_store_close(q.store);
  if (lock >= 0) close(lock);
  free(in);
  return st;
}
