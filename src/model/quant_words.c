// src/model/quant_words.c - reads the methods that pack codes in 32-bit words: gptq, awq, and
// auto-round, which writes either.
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "model/quant_scheme_impl.h"

typedef enum {
  GPTQ_V1, // zero points are stored minus 1
  GPTQ_V2,
  AWQ,
} packing;

// Settings of one kind of module: `special` overrides `general`.
typedef struct {
  const td_config_reader *r;
  const cJSON *general, *special;
} settings;

static const cJSON *holder(const settings *s, const char *key) {
  return td_json_get(s->special, key) ? s->special : s->general;
}

// Default: 4.
static td_status read_bits(const settings *s, uint32_t *bits) {
  *bits = 4;
  return td_quant_uint(s->r, holder(s, "bits"), "bits", 32, bits);
}

static td_status make_scheme(const settings *s, packing how, td_quant_scheme *out) {
  uint32_t bits, group_size = 0;
  bool symmetric = false;
  td_status st = read_bits(s, &bits);
  if (st == TD_OK && bits != 4 && (bits != 8 || how == AWQ)) {
    st = td_fail(s->r->err, TD_EUNSUPPORTED, "%s: bits %u is not supported; supported is %s",
                 s->r->file, bits, how == AWQ ? "4" : "4 and 8");
  }
  if (st == TD_OK) st = td_quant_group_size(s->r, holder(s, "group_size"), &group_size);
  if (st != TD_OK) return st;
  if (group_size % 8) {
    return td_fail(s->r->err, TD_EUNSUPPORTED,
                   "%s: group_size %u is not supported; supported are multiples of 8", s->r->file,
                   group_size);
  }
  if (how == AWQ) { // a file may have zero points although it declares none
    bool zero_point = true, sym = false;
    st = td_quant_bool(s->r, holder(s, "zero_point"), "zero_point", &zero_point);
    if (st == TD_OK) st = td_quant_bool(s->r, holder(s, "sym"), "sym", &sym);
    if (st != TD_OK) return st;
    symmetric = !zero_point || sym;
  }
  uint32_t zero_add = bits == 4 ? 0x11111111 : 0x01010101;
  *out = (td_quant_scheme){
      .format = how == AWQ  ? TD_QUANT_AWQ
                : bits == 4 ? TD_QUANT_GPTQ
                            : TD_QUANT_GPTQ8,
      .scale_rows = 1,
      .scale_cols = group_size,
      .symmetric = symmetric,
      .zero_add = how == GPTQ_V1 ? zero_add : 0,
  };
  return TD_OK;
}

// Applies settings to modules that match pattern; 16 bits and more mean not quantized.
static td_status add_modules(td_quant *quant, const settings *s, packing how, const char *pattern) {
  uint32_t bits;
  if (s->special && !cJSON_IsObject(s->special)) {
    return td_fail(s->r->err, TD_EFORMAT, "%s: %.60s must be an object", s->r->file,
                   s->special->string);
  }
  td_status st = read_bits(s, &bits);
  if (st != TD_OK) return st;
  if (bits >= 16) return td_quant_add_pattern(quant, s->r, pattern, TD_QUANT_IGNORE);
  td_quant_scheme scheme;
  st = make_scheme(s, how, &scheme);
  return st == TD_OK ? td_quant_add_scheme(quant, s->r, pattern, &scheme) : st;
}

// "dynamic": {"-:expression": {}} excludes modules; "+:expression" and "expression" override
// settings. Expressions match from the start of the name.
static td_status read_dynamic(td_quant *quant, const td_config_reader *r, const cJSON *config,
                              packing how) {
  const cJSON *dynamic = td_json_get(config, "dynamic");
  if (!dynamic || cJSON_IsFalse(dynamic)) return TD_OK;
  if (!cJSON_IsObject(dynamic)) return td_config_bad(r, "dynamic must be an object");
  td_buf text = TD_BUF_INIT;
  td_status st = TD_OK;
  for (const cJSON *item = dynamic->child; item && st == TD_OK; item = item->next) {
    bool is_marked = strncmp(item->string, "-:", 2) == 0 || strncmp(item->string, "+:", 2) == 0;
    settings s = {.r = r, .general = config, .special = item};
    td_buf_clear(&text);
    td_buf_printf(&text, "re:%s", item->string + (is_marked ? 2 : 0));
    st = td_buf_status(&text, r->err);
    if (st != TD_OK) break;
    st = is_marked && *item->string == '-'
             ? td_quant_add_pattern(quant, r, td_buf_text(&text), TD_QUANT_IGNORE)
             : add_modules(quant, &s, how, td_buf_text(&text));
  }
  td_buf_free(&text);
  return st;
}

td_status td_quant_read_gptq(td_quant *quant, const td_config_reader *r, const cJSON *config) {
  const char *format = "gptq";
  td_status st = td_quant_str(r, config, "checkpoint_format", &format);
  if (st != TD_OK) return st;
  bool v2 = strcmp(format, "gptq_v2") == 0;
  if (!v2 && strcmp(format, "gptq") != 0)
    return td_quant_unsupported(r, "checkpoint_format", format, "gptq and gptq_v2");
  settings s = {.r = r, .general = config};
  packing how = v2 ? GPTQ_V2 : GPTQ_V1;
  st = add_modules(quant, &s, how, "Linear");
  return st == TD_OK ? read_dynamic(quant, r, config, how) : st;
}

td_status td_quant_read_awq(td_quant *quant, const td_config_reader *r, const cJSON *config) {
  const char *version = "gemm";
  td_status st = td_quant_str(r, config, "version", &version);
  if (st != TD_OK) return st;
  if (strcasecmp(version, "gemm") != 0) return td_quant_unsupported(r, "version", version, "gemm");
  settings s = {.r = r, .general = config};
  return add_modules(quant, &s, AWQ, "Linear");
}

// Packing used by auto-round: "auto_round:auto_gptq", "auto_round:auto_awq", or its own, which is
// GPTQ's with zero points stored unchanged.
static td_status find_packing(const td_config_reader *r, const cJSON *config, packing *out) {
  const char *name = "auto_round:auto_gptq", *type = "int";
  td_status st = td_quant_str(r, config, "backend", &name); // in older files
  if (st == TD_OK) st = td_quant_str(r, config, "packing_format", &name);
  if (st == TD_OK) st = td_quant_str(r, config, "data_type", &type);
  if (st != TD_OK) return st;
  if (strcmp(type, "int") != 0) return td_quant_unsupported(r, "data_type", type, "int");
  static const char *const own[] = {"auto", "auto_round", "auto_round:exllamav2",
                                    "auto_round:tritonv2", "auto_round:gptqmodel"};
  *out = strstr(name, "awq") ? AWQ : strstr(name, "gptqmodel") ? GPTQ_V2 : GPTQ_V1;
  if (*out == AWQ || strstr(name, "gptq")) return TD_OK;
  for (size_t i = 0; i < TD_COUNT(own); i++) {
    if (strcmp(name, own[i]) != 0) continue;
    if (i) *out = GPTQ_V2; // "auto" means GPTQ's
    return TD_OK;
  }
  return td_quant_unsupported(r, "packing_format", name,
                              "auto_round, auto_round:auto_gptq and auto_round:auto_awq");
}

static bool is_module_name(const char *text) {
  return text[strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")] ==
         '\0';
}

td_status td_quant_read_auto_round(td_quant *quant, const td_config_reader *r,
                                   const cJSON *config) {
  packing how = GPTQ_V1;
  settings s = {.r = r, .general = config};
  td_status st = find_packing(r, config, &how);
  if (st == TD_OK) st = add_modules(quant, &s, how, "Linear");
  const cJSON *extra = td_json_get(config, "extra_config");
  if (st != TD_OK || !extra) return st;
  if (!cJSON_IsObject(extra)) return td_config_bad(r, "extra_config must be an object");
  td_buf text = TD_BUF_INIT;
  for (const cJSON *item = extra->child; item && st == TD_OK; item = item->next) {
    s.special = item;
    td_buf_clear(&text);
    // Keys are names, or regular expressions that match anywhere.
    td_buf_printf(&text, is_module_name(item->string) ? "%s" : "re:.*?(?:%s)", item->string);
    st = td_buf_status(&text, r->err);
    if (st == TD_OK) st = add_modules(quant, &s, how, td_buf_text(&text));
  }
  td_buf_free(&text);
  return st;
}
