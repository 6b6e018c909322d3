// src/model/quant_scheme.c - finds the scheme of a module by the rules of compressed-tensors: a
// name, its own or that of a module it is in, takes precedence over a regular expression, and that
// over a class of modules.
#include "model/quant_scheme.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/grow.h"
#include "gguf/files.h"
#include "model/quant_scheme_impl.h"

enum { MATCH_LIMIT = 100000 };

typedef enum { NAME, EXPRESSION, CLASS, N_KINDS } pattern_kind;

struct td_quant_pattern {
  pattern_kind kind;
  char *name;       // for NAME
  pcre2_code *code; // for EXPRESSION
  pcre2_match_data *match;
  pcre2_match_context *context;
  uint32_t scheme_idx;
};

static td_status compile(struct td_quant_pattern *p, const td_config_reader *r, const char *text) {
  int code;
  PCRE2_SIZE offset;
  p->code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED,
                          PCRE2_ANCHORED | PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C, &code, &offset,
                          NULL);
  if (!p->code) {
    PCRE2_UCHAR reason[128];
    pcre2_get_error_message(code, reason, sizeof reason);
    return td_config_fail(r, TD_EFORMAT,
                          "quantization_config: \"re:%.60s\" is not a regular expression: %s", text,
                          (const char *)reason);
  }
  p->match = pcre2_match_data_create(1, NULL);
  p->context = pcre2_match_context_create(NULL);
  if (!p->match || !p->context) return td_config_fail(r, TD_ENOMEM, "out of memory");
  pcre2_set_match_limit(p->context, MATCH_LIMIT);
  return TD_OK;
}

td_status td_quant_add_pattern(td_quant *quant, const td_config_reader *r, const char *text,
                               uint32_t scheme_idx) {
  if (!TD_GROW(quant->patterns, quant->n_patterns, quant->cap_patterns, 16))
    return td_config_fail(r, TD_ENOMEM, "out of memory");
  struct td_quant_pattern *p = &quant->patterns[quant->n_patterns++];
  *p = (struct td_quant_pattern){.scheme_idx = scheme_idx};
  if (strcmp(text, "Linear") == 0) {
    p->kind = CLASS;
    return TD_OK;
  }
  if (strncmp(text, "re:", 3) == 0) {
    p->kind = EXPRESSION;
    return compile(p, r, text + 3);
  }
  p->name = strdup(text);
  return p->name ? TD_OK : td_config_fail(r, TD_ENOMEM, "out of memory");
}

static bool is_same(const td_quant_scheme *a, const td_quant_scheme *b) {
  return a->format == b->format && a->scale_rows == b->scale_rows &&
         a->scale_cols == b->scale_cols && a->symmetric == b->symmetric &&
         a->zero_add == b->zero_add;
}

td_status td_quant_add_scheme(td_quant *quant, const td_config_reader *r, const char *text,
                              const td_quant_scheme *scheme) {
  uint32_t i = 0;
  while (i < quant->n_schemes && !is_same(&quant->schemes[i], scheme))
    i++;
  if (i == TD_QUANT_MAX_SCHEMES) {
    return td_config_fail(r, TD_EUNSUPPORTED, "more than %d ways to quantize are not supported",
                          TD_QUANT_MAX_SCHEMES);
  }
  if (i == quant->n_schemes) quant->schemes[quant->n_schemes++] = *scheme;
  return td_quant_add_pattern(quant, r, text, i);
}

static bool matches(const struct td_quant_pattern *p, const char *module) {
  switch (p->kind) {
  case NAME: {
    const size_t n = strlen(p->name);
    return strncmp(p->name, module, n) == 0 && (!module[n] || module[n] == '.');
  }
  case EXPRESSION:
    // A match that exceeds the limit counts as none; the tensor is then rejected by name.
    return pcre2_match(p->code, (PCRE2_SPTR)module, PCRE2_ZERO_TERMINATED, 0, 0, p->match,
                       p->context) >= 0;
  case CLASS: return true;
  case N_KINDS: break;
  }
  return false;
}

static const struct td_quant_pattern *find(const td_quant *quant, const char *module, bool ignore,
                                           pattern_kind kind) {
  for (size_t i = 0; i < quant->n_patterns; i++) {
    const struct td_quant_pattern *p = &quant->patterns[i];
    if (p->kind == kind && (p->scheme_idx == TD_QUANT_IGNORE) == ignore && matches(p, module))
      return p;
  }
  return NULL;
}

const td_quant_scheme *td_quant_find(const td_quant *quant, const char *module) {
  for (int kind = NAME; kind < N_KINDS; kind++)
    if (find(quant, module, true, kind)) return NULL;
  for (int kind = NAME; kind < N_KINDS; kind++) {
    const struct td_quant_pattern *p = find(quant, module, false, kind);
    if (p) return &quant->schemes[p->scheme_idx];
  }
  return NULL;
}

// quantization_config of config.json, or of its text_config; NULL: absent.
static const cJSON *config_of(const cJSON *root) {
  const cJSON *config = td_json_get(root, "quantization_config");
  const cJSON *text = td_json_get(root, "text_config");
  return config || !cJSON_IsObject(text) ? config : td_json_get(text, "quantization_config");
}

td_status td_quant_open(td_quant **out, const cJSON *root, const char *file, td_err *err) {
  td_err local;
  *out = NULL;
  td_config_reader r = {.root = root, .file = file, .err = err ? err : &local};
  td_quant *quant = calloc(1, sizeof *quant);
  if (!quant) return td_fail(err, TD_ENOMEM, "%s: out of memory", file);
  const cJSON *config = config_of(root);
  td_status st = config ? td_quant_read(quant, &r, config) : TD_OK;
  if (st == TD_OK)
    *out = quant;
  else
    td_quant_close(quant);
  return st;
}

// Parses dir/file. *root is NULL if it does not exist.
static td_status read_root(cJSON **root, char **path, const char *dir, const char *file,
                           td_err *err) {
  *root = NULL;
  if (asprintf(path, "%s/%s", dir, file) < 0) {
    *path = NULL;
    return td_fail(err, TD_ENOMEM, "out of memory");
  }
  if (!td_checkpoint_has(dir, file)) return TD_OK;
  return td_checkpoint_json(root, dir, file, TD_CONFIG_MAX_BYTES, err);
}

// Opens ModelOpt's own file.
static td_status open_modelopt(td_quant **out, const char *dir, td_err *err) {
  cJSON *root;
  char *path;
  td_status st = read_root(&root, &path, dir, "hf_quant_config.json", err);
  if (st == TD_OK && root) {
    td_config_reader r = {.root = root, .file = path, .err = err};
    st = td_quant_read_modelopt(*out, &r, root);
  }
  cJSON_Delete(root);
  free(path);
  return st;
}

td_status td_quant_open_dir(td_quant **out, const char *dir, td_err *err) {
  td_err local;
  if (!err) err = &local;
  *out = NULL;
  cJSON *root;
  char *path;
  td_status st = read_root(&root, &path, dir, "config.json", err);
  if (st == TD_OK && !root) st = td_fail(err, TD_ENOENT, "%s: no such file", path);
  if (st == TD_OK) st = td_quant_open(out, root, path, err);
  if (st == TD_OK && !config_of(root)) {
    st = open_modelopt(out, dir, err);
    if (st != TD_OK) {
      td_quant_close(*out);
      *out = NULL;
    }
  }
  cJSON_Delete(root);
  free(path);
  return st;
}

void td_quant_close(td_quant *quant) {
  if (!quant) return;
  for (size_t i = 0; i < quant->n_patterns; i++) {
    free(quant->patterns[i].name);
    pcre2_code_free(quant->patterns[i].code);
    pcre2_match_data_free(quant->patterns[i].match);
    pcre2_match_context_free(quant->patterns[i].context);
  }
  free(quant->patterns);
  free(quant);
}
