// src/model/quantize/quantize_files.c - writes everything but the shards: config.json with its
// quantization_config, copies of the checkpoint's other files, the report, and finally the index.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json_write.h"
#include "base/str.h"
#include "model/config.h"
#include "model/quantize/quantize_impl.h"

#define REPORT_FILE "quantize_report.json"
#define ENCODER     "encoding"

// Files that are neither weights nor rewritten: tokenizer, templates, licence and so on.
static bool is_copied(const char *name) {
  static const char *const others[] = {".safetensors", ".bin",        ".pt",   ".pth",
                                       ".gguf",        ".index.json", ".part", TD_QUANTIZE_DONE};
  if (td_is_word("config.json hf_quant_config.json " REPORT_FILE, name)) return false;
  if (name[0] == '.') return false;
  for (size_t i = 0; i < TD_COUNT(others); i++)
    if (td_ends_with(name, others[i])) return false;
  return true;
}

static td_status copy_file(td_quantizer *q, const char *name) {
  char *from = td_quantize_path(q->opts->in, name), *to = td_quantize_path(q->opts->out, name);
  td_file_map map = {0};
  struct stat info;
  td_status st = from && to ? TD_OK : td_quantize_no_memory(q);
  if (st == TD_OK && (stat(from, &info) != 0 || !S_ISREG(info.st_mode))) goto done;
  if (st == TD_OK) st = td_file_map_open(&map, from, q->err);
  if (st == TD_OK) st = td_file_write(to, map.data, map.n_bytes, q->err);
  td_file_map_close(&map);
done:
  free(from);
  free(to);
  return st;
}

static td_status copy_others(td_quantizer *q) {
  DIR *dir = opendir(q->opts->in);
  if (!dir) return td_fail(q->err, TD_EIO, "%s: %s", q->opts->in, strerror(errno));
  td_status st = TD_OK;
  for (struct dirent *e; st == TD_OK && (e = readdir(dir));)
    if (is_copied(e->d_name)) st = copy_file(q, e->d_name);
  closedir(dir);
  return st;
}

// Copies the prompt encoder that DeepSeek's checkpoints bring in place of a chat template.
static td_status copy_encoder(td_quantizer *q) {
  char *from = td_quantize_path(q->opts->in, ENCODER),
       *to = td_quantize_path(q->opts->out, ENCODER);
  td_status st = from && to ? TD_OK : td_quantize_no_memory(q);
  DIR *dir = st == TD_OK ? opendir(from) : NULL;
  if (dir && mkdir(to, 0777) != 0 && errno != EEXIST)
    st = td_fail(q->err, TD_EIO, "%s: %s", to, strerror(errno));
  for (struct dirent *e; dir && st == TD_OK && (e = readdir(dir));) {
    char name[sizeof ENCODER + sizeof e->d_name];
    snprintf(name, sizeof name, ENCODER "/%s", e->d_name);
    if (td_ends_with(name, ".py")) st = copy_file(q, name);
  }
  if (dir) closedir(dir);
  free(from);
  free(to);
  return st;
}

static td_status write_file(td_quantizer *q, const char *name, const td_buf *text) {
  char *path = td_quantize_path(q->opts->out, name);
  td_status st = path ? td_buf_status(text, q->err) : td_quantize_no_memory(q);
  if (st == TD_OK) st = td_file_write(path, text->data, text->len, q->err);
  free(path);
  return st;
}

static void add_module(td_json_writer *w, const char *name) {
  td_jw_str_len(w, NULL, name, strlen(name) - strlen(".weight"));
}

// Lists the matrices that transformers treats as linear layers and that were not encoded.
static void add_kept(const td_quantizer *q, td_json_writer *w, const char *key) {
  td_jw_begin_array(w, key);
  for (size_t i = 0; i < q->n_items; i++) {
    const td_quantize_item *item = &q->items[i];
    const td_tensor *t = item->t;
    if (item->action == TD_QUANTIZE_ENCODE || item->action == TD_QUANTIZE_DROP) continue;
    if (t->n_dims != 2 || !td_ends_with(t->name, ".weight")) continue;
    if (td_ends_with(t->name, "embed_tokens.weight")) continue;
    add_module(w, item->name);
  }
  td_jw_end_array(w);
}

// Writes one of config_groups. The group of the requested encoding targets every module that no
// other group names.
static void add_group(const td_quantizer *q, td_json_writer *w, const char *key,
                      const td_encoding *e) {
  bool is_main = e == q->opts->encoding;
  td_jw_begin_object(w, key);
  td_jw_begin_array(w, "targets");
  if (is_main) td_jw_str(w, NULL, "Linear");
  for (size_t i = 0; i < q->n_items && !is_main; i++)
    if (q->items[i].encoding == e) add_module(w, q->items[i].name);
  td_jw_add(w, "], 'format': %s, 'weights': {'num_bits': %u, 'type': %s", e->format,
            td_encoded_bits(e), e->type);
  if (e->block_rows > 1)
    td_jw_add(w, "'strategy': 'block', 'block_structure': [%u, %u]", e->block_rows, e->block_cols);
  else if (e->block_cols == TD_ENCODE_WHOLE_ROW)
    td_jw_str(w, "strategy", "channel");
  else
    td_jw_add(w, "'strategy': 'group', 'group_size': %u", e->block_cols);
  td_jw_add(w, "'symmetric': true, 'dynamic': false");
  if (strcmp(e->scale.dtype, "U8") == 0) td_jw_str(w, "scale_dtype", "torch.uint8");
  td_jw_add(w, "}, 'input_activations': null, 'output_activations': null}");
}

static void add_quant_config(const td_quantizer *q, td_json_writer *w) {
  bool mixed = false;
  for (size_t i = 0; i < q->n_items; i++)
    mixed |= q->items[i].encoding == &td_encoding_int8;
  td_jw_add(w, "'quant_method': 'compressed-tensors', 'format': %s, 'config_groups': {",
            mixed ? "mixed-precision" : q->opts->encoding->format);
  add_group(q, w, "group_0", q->opts->encoding);
  if (mixed) add_group(q, w, "group_1", &td_encoding_int8);
  td_jw_end_object(w);
  add_kept(q, w, "ignore");
  td_jw_add(w, "'kv_cache_scheme': null, 'quantization_status': 'compressed'");
}

static td_status write_config(td_quantizer *q) {
  char *path = td_quantize_path(q->opts->in, "config.json");
  cJSON *root = NULL;
  td_buf quant = TD_BUF_INIT, text = TD_BUF_INIT;
  td_status st = path ? td_json_parse_regular(&root, path, TD_CONFIG_MAX_BYTES, q->err)
                      : td_quantize_no_memory(q);
  td_json_writer w = TD_JSON_WRITER(&quant);
  td_jw_begin_object(&w, NULL);
  add_quant_config(q, &w);
  td_jw_end_object(&w);
  if (st == TD_OK) st = td_buf_status(&quant, q->err);
  if (st == TD_OK) {
    cJSON_DeleteItemFromObjectCaseSensitive(root, "quantization_config");
    cJSON *config = cJSON_Parse(td_buf_text(&quant));
    const bool is_added = cJSON_AddItemToObject(root, "quantization_config", config);
    if (!is_added) cJSON_Delete(config);
    char *printed = is_added ? cJSON_Print(root) : NULL;
    td_buf_printf(&text, "%s\n", printed ? printed : "");
    if (!printed) st = td_quantize_no_memory(q);
    cJSON_free(printed);
  }
  if (st == TD_OK) st = write_file(q, "config.json", &text);
  td_buf_free(&quant);
  td_buf_free(&text);
  cJSON_Delete(root);
  free(path);
  return st;
}

static td_status write_report(td_quantizer *q) {
  const td_quantize_report *r = q->report;
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_add(&w, "{'source': %s, 'to': %s, 'bytes_in': %lu, 'bytes_out': %lu, 'tensors': [",
            q->opts->in, q->opts->encoding->name, r->bytes_in, r->bytes_out);
  for (size_t i = 0; i < r->n_tensors; i++) {
    td_jw_add(&w, "{'name': %s, 'rows': %lu, 'cols': %lu, 'relative_rms_error': %g}",
              r->tensors[i].name, r->tensors[i].rows, r->tensors[i].cols, r->tensors[i].error);
  }
  td_jw_end_array(&w);
  add_kept(q, &w, "kept");
  td_jw_end_object(&w);
  td_buf_char(&text, '\n');
  td_status st = write_file(q, REPORT_FILE, &text);
  td_buf_free(&text);
  return st;
}

static td_status write_index(td_quantizer *q) {
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_add(&w, "{'metadata': {'total_size': %lu}, 'weight_map': {", q->report->bytes_out);
  for (size_t i = 0; i < q->n_shards; i++)
    for (size_t k = 0; k < q->shards[i].n_entries; k++)
      td_jw_str(&w, q->shards[i].entries[k].name, q->shards[i].name);
  td_jw_add(&w, "}}");
  td_status st = write_file(q, TD_QUANTIZE_INDEX, &text);
  td_buf_free(&text);
  return st;
}

// Removes what td_file_write leaves when it is killed: NAME.tmp.PID, of a NAME that was written
// since.
static void remove_leftovers(const td_quantizer *q) {
  DIR *dir = opendir(q->opts->out);
  for (struct dirent *e; dir && (e = readdir(dir));) {
    char name[sizeof e->d_name];
    strcpy(name, e->d_name);
    char *mark = strstr(name, ".tmp.");
    if (!mark || !mark[5] || mark[5 + strspn(mark + 5, "0123456789")]) continue;
    *mark = '\0';
    if (faccessat(dirfd(dir), name, F_OK, 0) == 0) unlinkat(dirfd(dir), e->d_name, 0);
  }
  if (dir) closedir(dir);
}

static void remove_notes(const td_quantizer *q) {
  for (size_t i = 0; i < q->n_shards; i++) {
    char *path;
    if (asprintf(&path, "%s/%s" TD_QUANTIZE_DONE, q->opts->out, q->shards[i].name) < 0) continue;
    unlink(path);
    free(path);
  }
}

td_status td_quantize_finish(td_quantizer *q) {
  td_status st = copy_others(q);
  if (st == TD_OK) st = copy_encoder(q);
  if (st == TD_OK) st = write_config(q);
  if (st == TD_OK) st = write_report(q);
  if (st == TD_OK) st = write_index(q);
  if (st == TD_OK) {
    remove_leftovers(q);
    remove_notes(q);
  }
  return st;
}
