// src/model/quantize/quantize_shard.c - makes one shard in parallel pieces, or keeps a finished
// one. Beside a finished shard there is a file <shard>.done with its source, its target, its
// checksum, and the errors of its tensors. A shard is kept if all of this, and its header, match
// what would be made now.
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/bf16.h"
#include "base/cpus.h"
#include "base/fs.h"
#include "base/grow.h"
#include "base/json_parse.h"
#include "base/json_write.h"
#include "model/quantize/quantize_impl.h"
#include "tandem/kernels.h"

enum { PIECE_BYTES = 2 << 20, MAX_DONE_BYTES = 256 << 20 };

// A unit of work: rows of a tensor, or a byte range of a copied one.
typedef struct {
  size_t item;
  uint64_t begin, end;
  td_encode_result result;
} piece;

typedef struct {
  td_quantizer *q;
  const td_quantize_shard *shard;
  td_shard_writer writer;
  piece *pieces;
  size_t n_pieces, cap_pieces;
  td_status status;
  td_err err; // of the first piece that failed
} making;

static bool cut_item(making *m, size_t idx) {
  const td_quantize_item *item = &m->q->items[idx];
  uint64_t n = item->t->n_bytes, step = PIECE_BYTES;
  if (item->action == TD_QUANTIZE_DROP) return true;
  if (item->action != TD_QUANTIZE_COPY) {
    uint32_t block = item->encoding ? item->encoding->block_rows : 1;
    n = item->w.rows;
    step = PIECE_BYTES / sizeof(float) / item->w.cols / block * block;
    if (step == 0) step = block;
  }
  for (uint64_t at = 0; at < n; at += step) {
    if (!TD_GROW(m->pieces, m->n_pieces, m->cap_pieces, 256)) return false;
    m->pieces[m->n_pieces++] = (piece){
        .item = idx, .begin = at, .end = at + step < n ? at + step : n};
  }
  return true;
}

static td_status put_bf16(const making *m, const piece *p, const float *rows, td_err *err) {
  const td_quantize_item *item = &m->q->items[p->item];
  size_t n = (p->end - p->begin) * item->w.cols;
  uint16_t *out = malloc(n * sizeof *out);
  if (!out) return td_fail(err, TD_ENOMEM, "%s: out of memory", item->t->file);
  for (size_t i = 0; i < n; i++)
    out[i] = td_bf16_of(rows[i]);
  uint64_t offset = m->shard->entries[item->entry].offset + p->begin * item->w.cols * sizeof *out;
  td_status st = td_shard_writer_put(&m->writer, offset, out, n * sizeof *out, err);
  free(out);
  return st;
}

static td_status put_encoded(const making *m, piece *p, const float *rows, td_err *err) {
  const td_quantize_item *item = &m->q->items[p->item];
  const td_encoding *e = item->encoding;
  const td_shard_entry *entries = &m->shard->entries[item->entry];
  uint32_t n_rows = (uint32_t)(p->end - p->begin), cols = item->w.cols;
  size_t row_bytes = td_encoded_row_bytes(e, cols);
  size_t strip_bytes = td_encoded_groups(e, cols) * e->scale.item_bytes;
  uint64_t first = p->begin / e->block_rows,
           n_strips = (n_rows + e->block_rows - 1) / e->block_rows;
  uint8_t *codes = malloc(n_rows * row_bytes + n_strips * strip_bytes);
  if (!codes) return td_fail(err, TD_ENOMEM, "%s: out of memory", item->t->file);
  uint8_t *scales = codes + n_rows * row_bytes;
  p->result = td_encode_rows(e, rows, n_rows, cols, codes, scales);
  td_status st = TD_OK;
  if (!p->result.finite) {
    st = td_fail(err, TD_EFORMAT, "%s: tensor %s: holds a value that is not finite", item->t->file,
                 item->name);
  }
  if (st == TD_OK) {
    st = td_shard_writer_put(&m->writer, entries[0].offset + p->begin * row_bytes, codes,
                             n_rows * row_bytes, err);
  }
  if (st == TD_OK) {
    st = td_shard_writer_put(&m->writer, entries[1].offset + first * strip_bytes, scales,
                             n_strips * strip_bytes, err);
  }
  free(codes);
  if (st != TD_OK || !e->states_shape || p->begin) return st;
  int64_t shape[2] = {item->w.rows, item->w.cols};
  return td_shard_writer_put(&m->writer, entries[2].offset, shape, sizeof shape, err);
}

static td_status make_piece(const making *m, piece *p, td_err *err) {
  const td_quantize_item *item = &m->q->items[p->item];
  if (item->action == TD_QUANTIZE_COPY) {
    uint64_t offset = m->shard->entries[item->entry].offset + p->begin;
    return td_shard_writer_put(&m->writer, offset, item->t->data + p->begin, p->end - p->begin,
                               err);
  }
  float *rows = malloc((p->end - p->begin) * item->w.cols * sizeof *rows);
  if (!rows) return td_fail(err, TD_ENOMEM, "%s: out of memory", item->t->file);
  for (uint64_t r = p->begin; r < p->end; r++) {
    td_kernels()->decode_row(&(td_decode_row_args){
        .w = &item->w, .out = rows + (r - p->begin) * item->w.cols, .row = (uint32_t)r});
  }
  td_status st = item->action == TD_QUANTIZE_BF16 ? put_bf16(m, p, rows, err)
                                                  : put_encoded(m, p, rows, err);
  free(rows);
  return st;
}

static void make_pieces(making *m) {
#pragma omp parallel for schedule(dynamic, 1)                                                      \
    num_threads(m->q->opts->n_threads ? m->q->opts->n_threads : td_cpu_count())
  for (size_t i = 0; i < m->n_pieces; i++) {
    td_err err;
    td_status st = make_piece(m, &m->pieces[i], &err);
#pragma omp critical
    if (st != TD_OK && m->status == TD_OK) {
      m->status = st;
      m->err = err;
    }
  }
}

static td_status note_errors(const making *m) {
  for (size_t i = 0; i < m->n_pieces;) {
    const td_quantize_item *item = &m->q->items[m->pieces[i].item];
    double error = 0, norm = 0;
    size_t first = i;
    for (; i < m->n_pieces && m->pieces[i].item == m->pieces[first].item; i++) {
      error += m->pieces[i].result.error;
      norm += m->pieces[i].result.norm;
    }
    if (item->action != TD_QUANTIZE_ENCODE) continue;
    size_t len = strlen(item->name) - strlen(".weight");
    td_status st = td_quantize_note(m->q, item->name, len, item->w.rows, item->w.cols,
                                    norm > 0 ? sqrt(error / norm) : 0);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

// Checksum of a whole file: four lanes of 8 bytes, mixed by odd multipliers.
static uint64_t checksum(const void *data, size_t n_bytes) {
  const uint8_t *p = data;
  uint64_t lane[4] = {1, 2, 3, n_bytes};
  for (; n_bytes; n_bytes -= n_bytes < 32 ? n_bytes : 32, p += 32) {
    uint64_t words[4] = {0};
    memcpy(words, p, n_bytes < 32 ? n_bytes : 32);
    for (int i = 0; i < 4; i++) {
      lane[i] = (lane[i] ^ words[i]) * 0x9e3779b97f4a7c15u;
      lane[i] ^= lane[i] >> 29;
    }
  }
  uint64_t sum = 0;
  for (int i = 0; i < 4; i++)
    sum = (sum ^ lane[i]) * 0xbf58476d1ce4e5b9u;
  return sum ^ sum >> 32;
}

static td_status checksum_file(const char *path, uint64_t *out, td_err *err) {
  td_file_map map;
  td_status st = td_file_map_open(&map, path, err);
  if (st == TD_OK) *out = checksum(map.data, map.n_bytes);
  td_file_map_close(&map);
  return st;
}

// Describes source and target of a shard in one line.
static td_status describe(const td_quantizer *q, const td_quantize_shard *s, td_buf *out) {
  struct stat info;
  if (stat(s->source, &info) != 0)
    return td_fail(q->err, TD_EIO, "%s: %s", s->source, strerror(errno));
  td_buf_printf(out, "%s of %lld bytes, %lld.%09ld, to %s", s->source, (long long)info.st_size,
                (long long)info.st_mtim.tv_sec, info.st_mtim.tv_nsec, q->opts->encoding->name);
  return td_buf_status(out, q->err);
}

static char *done_path(const td_quantizer *q, const td_quantize_shard *s) {
  char *path;
  return asprintf(&path, "%s/%s" TD_QUANTIZE_DONE, q->opts->out, s->name) < 0 ? NULL : path;
}

static td_status write_done(const td_quantizer *q, const td_quantize_shard *s, size_t first_noted,
                            uint64_t sum) {
  td_buf text = TD_BUF_INIT, made = TD_BUF_INIT;
  char *path = done_path(q, s), hex[24];
  td_status st = path ? describe(q, s, &made) : td_quantize_no_memory(q);
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_add(&w, "{'made': %s", td_buf_text(&made));
  snprintf(hex, sizeof hex, "%016llx", (unsigned long long)sum);
  td_jw_add(&w, "'checksum': %s, 'tensors': [", hex);
  for (size_t i = first_noted; i < q->report->n_tensors; i++) {
    const td_quantized *t = &q->report->tensors[i];
    td_jw_add(&w, "{'name': %s, 'rows': %lu, 'cols': %lu, 'error': %g}", t->name, t->rows, t->cols,
              t->error);
  }
  td_jw_add(&w, "]}");
  if (st == TD_OK) st = td_buf_status(&text, q->err);
  if (st == TD_OK) st = td_file_write(path, text.data, text.len, q->err);
  td_buf_free(&text);
  td_buf_free(&made);
  free(path);
  return st;
}

static td_status make(making *m) {
  td_quantizer *q = m->q;
  size_t first_noted = q->report->n_tensors;
  make_pieces(m);
  if (m->status != TD_OK) {
    if (q->err) *q->err = m->err;
    return m->status;
  }
  td_status st = note_errors(m);
  if (st == TD_OK) st = td_shard_writer_sync(&m->writer, q->err);
  uint64_t sum = 0;
  if (st == TD_OK) st = checksum_file(m->writer.temporary, &sum, q->err);
  if (st == TD_OK) st = write_done(q, m->shard, first_noted, sum);
  return st == TD_OK ? td_shard_writer_commit(&m->writer, q->err) : st;
}

// Whether the finished shard at path equals what would be made now; done is its parsed .done file.
static bool is_same(const td_quantizer *q, const td_quantize_shard *s, const char *path,
                    const cJSON *done) {
  td_buf made = TD_BUF_INIT;
  const char *said = cJSON_GetStringValue(td_json_get(done, "made"));
  const char *sum = cJSON_GetStringValue(td_json_get(done, "checksum"));
  bool same = describe(q, s, &made) == TD_OK && said && sum &&
              strcmp(said, td_buf_text(&made)) == 0;
  td_buf_free(&made);
  td_file_map map;
  if (!same || td_file_map_open(&map, path, NULL) != TD_OK) return false;
  char hex[24] = "";
  if (map.n_bytes == s->n_bytes && memcmp(map.data, s->header.data, s->header.len) == 0)
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)checksum(map.data, map.n_bytes));
  td_file_map_close(&map);
  return strcmp(hex, sum) == 0;
}

static td_status note_done(td_quantizer *q, const cJSON *done) {
  const cJSON *tensors = td_json_get(done, "tensors");
  for (const cJSON *t = tensors ? tensors->child : NULL; t; t = t->next) {
    const char *name = cJSON_GetStringValue(td_json_get(t, "name"));
    int64_t rows = 0, cols = 0;
    td_json_whole(td_json_get(t, "rows"), 0, INT64_MAX, &rows);
    td_json_whole(td_json_get(t, "cols"), 0, INT64_MAX, &cols);
    td_status st = td_quantize_note(q, name ? name : "", name ? strlen(name) : 0, (uint64_t)rows,
                                    (uint64_t)cols, cJSON_GetNumberValue(td_json_get(t, "error")));
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

// *kept: the shard exists already.
static td_status keep(td_quantizer *q, const td_quantize_shard *s, const char *path, bool *kept) {
  char *beside = done_path(q, s);
  if (!beside) return td_quantize_no_memory(q);
  cJSON *done = NULL;
  *kept = td_file_exists(path) &&
          td_json_parse_regular(&done, beside, MAX_DONE_BYTES, NULL) == TD_OK &&
          is_same(q, s, path, done);
  td_status st = *kept ? note_done(q, done) : TD_OK;
  cJSON_Delete(done);
  free(beside);
  return st;
}

td_status td_quantize_shard_make(td_quantizer *q, size_t idx) {
  const td_quantize_shard *s = &q->shards[idx];
  char *path = td_quantize_path(q->opts->out, s->name);
  if (!path) return td_quantize_no_memory(q);
  bool kept;
  td_status st = keep(q, s, path, &kept);
  if (st == TD_OK && q->opts->progress)
    q->opts->progress(q->opts->ctx, s->name, idx, q->n_shards, kept);
  if (st == TD_OK && !kept) {
    making m = {.q = q, .shard = s, .writer = {.fd = -1}};
    for (size_t i = s->begin; i < s->end && st == TD_OK; i++)
      if (!cut_item(&m, i)) st = td_quantize_no_memory(q);
    if (st == TD_OK) st = td_shard_writer_open(&m.writer, path, s->n_bytes, &s->header, q->err);
    if (st == TD_OK) st = make(&m);
    td_shard_writer_close(&m.writer);
    free(m.pieces);
  }
  free(path);
  return st;
}
