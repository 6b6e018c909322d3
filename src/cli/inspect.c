// src/cli/inspect.c - prints a description of a checkpoint, as text or JSON.
#include "cli/inspect.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/calls/call_syntax.h"
#include "base/fs.h"
#include "base/json_write.h"
#include "base/units.h"
#include "cli/cli.h"
#include "cli/plan.h"
#include "engine/attn/kind.h"
#include "engine/engine.h"
#include "model/model.h"
#include "runtime/command.h"
#include "text/chat.h"

static uint32_t count_moe_layers(const td_model_config *c) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n += td_model_is_moe(c, i);
  return n;
}

// 671026419200 becomes "671.03 B" (billions, as in model names).
static void add_count(td_buf *out, uint64_t n) {
  if (n >= 1000000000)
    td_buf_printf(out, "%.2f B", (double)n * 1e-9);
  else if (n >= 1000000)
    td_buf_printf(out, "%.2f M", (double)n * 1e-6);
  else
    td_buf_printf(out, "%llu", (unsigned long long)n);
}

static void add_architecture(td_buf *out, const td_model_config *c) {
  td_buf_printf(out, "architecture  %s: %u layers of width %u, vocabulary of %u\n", c->arch_name,
                c->n_layers, c->dim, c->n_vocab);
  td_attn_describe(c, out);
  uint32_t n_moe = count_moe_layers(c);
  td_buf_printf(out, "experts       %u a layer, %u for a token", c->n_experts, c->top_k);
  if (c->n_shared_experts) td_buf_printf(out, " and %u shared", c->n_shared_experts);
  td_buf_printf(out, ", %u wide\n", c->expert_dim);
  if (n_moe < c->n_layers) {
    td_buf_printf(out, "dense         %u of the %u layers, %u wide\n", c->n_layers - n_moe,
                  c->n_layers, c->dense_dim);
  }
}

static void add_memory(td_buf *out, const td_model_config *c, const td_model_stats *s,
                       td_dtype kv_dtype) {
  td_buf_printf(out, "\ndecoding      reads %s of weights for a token\nmemory        %s",
                td_size(s->active_bytes).text, td_size(s->bytes).text);
  const td_kv_layout kv = td_kv_layout_of(c, kv_dtype, 0);
  if (kv.n_layers)
    td_buf_printf(out, ", and %s for every 1000 tokens of context",
                  td_size(1000 * (double)td_kv_layout_token_bytes(&kv)).text);
  if (kv.n_states) {
    td_buf_printf(out, ", and %s %s for every %u%s", td_size(td_kv_layout_states_bytes(&kv)).text,
                  kv.n_blocks ? "in layers with a window" : "of recurrent states", kv.page_tokens,
                  kv.n_layers ? "" : " tokens of context");
  }
  td_buf_str(out, "\n");
}

static void add_vision(td_buf *out, const td_model *m) {
  const td_vision_config *v = &td_model_config_of(m)->vision;
  if (!v->n_layers) return;
  td_buf_printf(out,
                "images        a tower of %u layers, %u wide: a token for %u x %u pixels; %s, "
                "beside the above\n",
                v->n_layers, v->dim, v->merge * v->patch, v->merge * v->patch,
                td_size(td_model_stats_of(m).vision_bytes).text);
}

static void add_unused(td_buf *out, const td_model *m) {
  const td_model_config *c = td_model_config_of(m);
  const uint32_t n_used = td_model_mtp(m) != NULL;
  if (n_used) td_buf_str(out, "drafting      by a layer of multi-token prediction\n");
  if (c->n_mtp_layers > n_used) {
    td_buf_printf(out, "not used      multi-token prediction: %u of its layers\n",
                  c->n_mtp_layers - n_used);
  }
  if (c->n_other_tensors)
    td_buf_printf(out, "not used      vision: %u tensors, %s\n", c->n_other_tensors,
                  td_size(c->other_bytes).text);
}

// Bits of 256 elements.
static uint32_t bits_of_256(td_dtype dtype) {
  const td_block block = td_dtype_block(dtype);
  return block.cols ? 256 / block.cols * block.bytes * 8 : td_dtype_bits(dtype) * 256;
}

// The dtype with the fewest bits of those that have bytes; TD_N_DTYPES: none has.
static td_dtype smallest(const uint64_t bytes[TD_N_DTYPES]) {
  td_dtype best = TD_N_DTYPES;
  for (td_dtype d = 0; d < TD_N_DTYPES; d++)
    if (bytes[d] && (best == TD_N_DTYPES || bits_of_256(d) < bits_of_256(best))) best = d;
  return best;
}

static void add_sizes(td_buf *out, const td_model *m, td_dtype kv_dtype) {
  const td_model_config *c = td_model_config_of(m);
  td_model_stats s = td_model_stats_of(m);
  td_buf_str(out, "parameters    ");
  add_count(out, s.params);
  td_buf_str(out, " in total, ");
  add_count(out, s.active_params);
  td_buf_printf(out, " active for a token\nweights       %s", td_size(s.bytes).text);
  const char *before = ": ";
  for (uint32_t n = 0; n < TD_N_DTYPES; n++) {
    const td_dtype dtype = smallest(s.bytes_by_dtype);
    if (dtype == TD_N_DTYPES) break;
    td_buf_printf(out, "%s%s %s", before, td_dtype_name(dtype),
                  td_size(s.bytes_by_dtype[dtype]).text);
    s.bytes_by_dtype[dtype] = 0;
    before = ", ";
  }
  add_memory(out, c, &s, kv_dtype);
  if (s.table_bytes)
    td_buf_printf(out, "tables        %s of n-grams, whose rows are read from disk\n",
                  td_size(s.table_bytes).text);
  if (s.expert_bytes && td_attn_has_gpu(c))
    td_buf_printf(out,
                  "with a GPU    the context and %s of weights in its memory, %s of experts in the "
                  "CPU's, or in its own as far as they fit\n",
                  td_size(s.bytes - s.expert_bytes).text, td_size(s.expert_bytes).text);
  td_buf_printf(out, "context       up to %u tokens", c->max_position);
  if (c->yarn.factor != 1)
    td_buf_printf(out, " (YaRN, %g times %u)", c->yarn.factor, c->yarn.original_max_position);
  td_buf_str(out, "\n");
  add_vision(out, m);
  add_unused(out, m);
}

// How one talks with the model. Empty: not known, or there is none.
typedef struct {
  bool has_template;
  char thoughts[64], calls[64]; // the markers that begin them
  const char *licence;          // the file's name
} chat_facts;

static chat_facts chat_facts_of(const td_model *m) {
  static const char *const licences[] = {"LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE"};
  chat_facts f = {.has_template = false};
  td_chat *chat;
  for (size_t i = 0; i < TD_COUNT(licences) && !f.licence; i++) {
    char path[PATH_MAX];
    const int n = snprintf(path, sizeof path, "%s/%s", td_model_dir(m), licences[i]);
    if (n < (int)sizeof path && td_file_exists(path)) f.licence = licences[i];
  }
  if (td_chat_open(&chat, td_model_dir(m), NULL) != TD_OK) return f; // without a tokenizer
  td_buf source = TD_BUF_INIT;
  td_chat_template_source(chat, &source);
  f.has_template = source.len > 0;
  td_buf_free(&source);
  const td_output_form *form = td_output_form_of(chat);
  if (form) snprintf(f.thoughts, sizeof f.thoughts, "%s", form->think_begin);
  if (td_chat_template_mentions(chat, "tools")) {
    td_call_syntax syntax;
    td_call_syntax_open(&syntax, chat);
    const char *begin = td_call_syntax_of_form(syntax.form)->open;
    begin += strspn(begin, " \n");
    snprintf(f.calls, sizeof f.calls, "%.*s", (int)strcspn(begin, " \n{"), begin);
    td_call_syntax_close(&syntax);
  }
  td_chat_close(chat);
  return f;
}

static void add_chat(td_buf *out, const td_model *m) {
  const chat_facts f = chat_facts_of(m);
  const td_model_config *c = td_model_config_of(m);
  td_buf_str(out, f.has_template ? "chat          by a template" : "chat          no template");
  if (f.thoughts[0]) td_buf_printf(out, ", thoughts behind %s", f.thoughts);
  if (f.calls[0]) td_buf_printf(out, ", tool calls behind %s", f.calls);
  td_buf_printf(out, "\nsampling      temperature %g, top_p %g", (double)c->temperature,
                (double)c->top_p);
  if (c->top_k_sampling) td_buf_printf(out, ", top_k %u", c->top_k_sampling);
  td_buf_str(out, ", unless a request says otherwise\n");
  if (f.licence) td_buf_printf(out, "licence       %s\n", f.licence);
}

static void add_json_chat(td_json_writer *w, const td_model *m) {
  const chat_facts f = chat_facts_of(m);
  const td_model_config *c = td_model_config_of(m);
  td_jw_bool(w, "has_chat_template", f.has_template);
  if (f.thoughts[0]) td_jw_str(w, "thoughts_begin", f.thoughts);
  if (f.calls[0]) td_jw_str(w, "calls_begin", f.calls);
  td_jw_add(w, "'temperature': %g, 'top_p': %g, 'top_k_sampling': %u", (double)c->temperature,
            (double)c->top_p, c->top_k_sampling);
  if (f.licence) td_jw_str(w, "licence", f.licence);
}

static void add_tensors(td_buf *out, const td_model *m) {
  for (size_t i = 0; i < td_model_n_tensors(m); i++) {
    td_tensor_info t = td_model_tensor(m, i);
    char shape[192];
    size_t len = (size_t)snprintf(shape, sizeof shape, "[");
    for (uint32_t d = 0; d < t.n_dims; d++) {
      len += (size_t)snprintf(shape + len, sizeof shape - len, "%s%llu", d ? ", " : "",
                              (unsigned long long)t.shape[d]);
    }
    snprintf(shape + len, sizeof shape - len, "]");
    td_buf_printf(out, "%-8s %-16s %12llu  %s  %s\n", t.dtype, shape, (unsigned long long)t.n_bytes,
                  t.file, t.name);
  }
}

// On the machines of configs/machines, as `tandem plan` has it for any.
static void add_plans(td_buf *out, const td_model *m, td_dtype kv_dtype) {
  td_plan_opts opts = td_plan_usual;
  opts.kv_dtype = kv_dtype;
  opts.is_short = true;
  td_rig rig;
  for (const td_rig_file *f = td_rig_files; f->name; f++) {
    if (td_rig_parse(&rig, f->json, f->len, f->name, NULL) != TD_OK) continue;
    td_buf_str(out, "\n");
    td_plan_add(out, m, &rig, &opts);
    if (!rig.n_gpus) td_plan_add_cards(out, m, &rig, &opts);
  }
}

static void add_json_plans(td_json_writer *w, const td_model *m, td_dtype kv_dtype) {
  td_plan_opts opts = td_plan_usual;
  opts.kv_dtype = kv_dtype;
  td_rig rig;
  td_jw_begin_array(w, "plans");
  for (const td_rig_file *f = td_rig_files; f->name; f++) {
    if (td_rig_parse(&rig, f->json, f->len, f->name, NULL) != TD_OK) continue;
    td_plan_add_json(w, m, &rig, &opts);
  }
  td_jw_end_array(w);
}

static void add_text(td_buf *out, const td_model *m, const td_inspect_opts *opts) {
  td_buf_printf(out, "%s (%s)\n", td_model_name(m), td_model_dir(m));
  add_architecture(out, td_model_config_of(m));
  add_sizes(out, m, opts->kv_dtype);
  add_chat(out, m);
  if (td_model_stats_of(m).expert_bytes) add_plans(out, m, opts->kv_dtype);
  if (opts->tensors) {
    td_buf_printf(out, "\n%-8s %-16s %12s  file, name\n", "dtype", "shape", "bytes");
    add_tensors(out, m);
  }
}

static void add_json_tensors(td_json_writer *w, const td_model *m) {
  td_jw_begin_array(w, "tensors");
  for (size_t i = 0; i < td_model_n_tensors(m); i++) {
    td_tensor_info t = td_model_tensor(m, i);
    td_jw_add(w, "{'name': %s, 'dtype': %s, 'shape': [", t.name, t.dtype);
    for (uint32_t d = 0; d < t.n_dims; d++)
      td_jw_int(w, NULL, (int64_t)t.shape[d]);
    td_jw_add(w, "], 'bytes': %lu, 'file': %s}", t.n_bytes, t.file);
  }
  td_jw_end_array(w);
}

static void add_json_sizes(td_json_writer *w, const td_model *m, td_dtype kv_dtype) {
  td_model_stats s = td_model_stats_of(m);
  td_jw_add(w,
            "'params': %lu, 'active_params': %lu, 'weight_bytes': %lu, 'expert_bytes': %lu, "
            "'active_bytes': %lu, 'bytes_by_dtype': {",
            s.params, s.active_params, s.bytes, s.expert_bytes, s.active_bytes);
  for (int i = 0; i < TD_N_DTYPES; i++) {
    if (!s.bytes_by_dtype[i]) continue;
    td_jw_int(w, td_dtype_name((td_dtype)i), (int64_t)s.bytes_by_dtype[i]);
  }
  td_jw_end_object(w);
  const td_kv_layout kv = td_kv_layout_of(td_model_config_of(m), kv_dtype, 0);
  td_jw_add(w, "'kv_bytes_per_token': %lu, 'state_bytes_per_page': %lu, 'page_tokens': %u",
            td_kv_layout_token_bytes(&kv), td_kv_layout_states_bytes(&kv), kv.page_tokens);
}

static void add_json(td_buf *out, const td_model *m, const td_inspect_opts *opts) {
  const td_model_config *c = td_model_config_of(m);
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'name': %s, 'dir': %s, 'architecture': %s", td_model_name(m), td_model_dir(m),
            c->arch_name);
  const struct {
    const char *key;
    uint32_t value;
  } dims[] = {
      {"n_layers", c->n_layers},
      {"n_moe_layers", count_moe_layers(c)},
      {"n_delta_layers", td_model_n_attn(c, TD_ATTN_DELTA) + td_model_n_attn(c, TD_ATTN_KDA)},
      {"dim", c->dim},
      {"n_vocab", c->n_vocab},
      {"n_heads", c->n_heads},
      {"n_kv_heads", c->n_kv_heads},
      {"head_dim", c->head_dim},
      {"q_lora_rank", c->q_lora_rank},
      {"n_experts", c->n_experts},
      {"kv_lora_rank", c->kv_lora_rank},
      {"top_k", c->top_k},
      {"n_shared_experts", c->n_shared_experts},
      {"expert_dim", c->expert_dim},
      {"dense_dim", c->dense_dim},
      {"n_groups", c->n_groups},
      {"max_position", c->max_position},
      {"n_mtp_layers", c->n_mtp_layers},
      {"n_other_tensors", c->n_other_tensors},
  };
  for (size_t i = 0; i < TD_COUNT(dims); i++)
    td_jw_int(&w, dims[i].key, dims[i].value);
  if (c->vision.n_layers) td_jw_int(&w, "vision_bytes", (int64_t)td_model_stats_of(m).vision_bytes);
  add_json_sizes(&w, m, opts->kv_dtype);
  add_json_chat(&w, m);
  if (td_model_stats_of(m).expert_bytes) add_json_plans(&w, m, opts->kv_dtype);
  if (opts->tensors) add_json_tensors(&w, m);
  td_jw_end_object(&w);
  td_buf_char(out, '\n');
}

td_status td_inspect_model(const char *dir, const td_inspect_opts *opts, FILE *out, td_err *err) {
  td_model *m;
  td_status st = td_model_open_shapes(&m, dir, err);
  if (st == TD_OK) st = td_attn_check_kv(td_model_config_of(m), opts->kv_dtype, err);
  if (st != TD_OK) {
    td_model_close(m);
    return st;
  }
  td_buf text = TD_BUF_INIT;
  if (opts->json)
    add_json(&text, m, opts);
  else
    add_text(&text, m, opts);
  td_model_close(m);
  st = td_buf_status(&text, err);
  if (st == TD_OK && (fwrite(text.data, 1, text.len, out) != text.len || fflush(out) != 0))
    st = td_fail(err, TD_EIO, "standard output: cannot write: %s", strerror(errno));
  td_buf_free(&text);
  return st;
}

// ---- the command --------------------------------------------------------------------------------

#define MAX_INPUT_BYTES (1u << 28)

int td_cmd_inspect(const td_options *o) {
  td_err err;
  td_status st = td_cmd_need_model(o, &err);
  const td_inspect_opts opts = {
      .tensors = o->tensors, .json = o->json, .kv_dtype = td_cmd_kv_dtype(o)};
  if (st == TD_OK) st = td_inspect_model(o->model, &opts, stdout, &err);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}

static td_status print_text(const td_buf *text, td_err *err) {
  td_status st = td_buf_status(text, err);
  if (st != TD_OK) return st;
  bool whole = fwrite(td_buf_text(text), 1, text->len, stdout) == text->len && fflush(stdout) == 0;
  return whole ? TD_OK : td_fail(err, TD_EIO, "standard output: cannot write");
}

static td_status print_ids(const td_tokenizer *tok, const td_buf *text, td_err *err) {
  td_token_ids ids = {0};
  td_buf out = TD_BUF_INIT;
  td_status st = td_tokenizer_encode(tok, td_buf_text(text), text->len,
                                     TD_TOK_ADD_SPECIAL | TD_TOK_PARSE_SPECIAL, &ids, err);
  td_buf_char(&out, '[');
  for (size_t i = 0; i < ids.n; i++)
    td_buf_printf(&out, "%s%d", i ? "," : "", ids.ids[i]);
  td_buf_str(&out, "]\n");
  if (st == TD_OK) st = print_text(&out, err);
  td_buf_free(&out);
  td_token_ids_free(&ids);
  return st;
}

// Parses "[1, 2, 3]".
static td_status parse_ids(const char *text, td_token_ids *ids, td_err *err) {
  const char *space = " \t\r\n", *at = text + strspn(text, space);
  td_status st = TD_OK;
  bool ok = *at == '[';
  at += ok;
  at += strspn(at, space);
  while (ok && st == TD_OK && *at != ']') {
    char *end;
    long id = strtol(at, &end, 10);
    ok = end != at && id >= 0 && id <= INT32_MAX;
    if (!ok) break;
    st = td_token_ids_push(ids, (int32_t)id, err);
    at = end + strspn(end, space);
    if (*at == ',') {
      at += 1 + strspn(at + 1, space);
      ok = *at != ']';
    } else {
      ok = *at == ']';
    }
  }
  if (ok) at++;
  if (!ok || at[strspn(at, space)])
    return td_fail(err, TD_EFORMAT, "standard input: not a JSON array of token ids");
  return st;
}

static td_status print_decoded(const td_tokenizer *tok, const td_buf *text, td_err *err) {
  td_token_ids ids = {0};
  td_buf out = TD_BUF_INIT;
  td_status st = parse_ids(td_buf_text(text), &ids, err);
  if (st == TD_OK) st = td_tokenizer_decode(tok, ids.ids, ids.n, false, &out, err);
  if (st == TD_OK) st = print_text(&out, err);
  td_buf_free(&out);
  td_token_ids_free(&ids);
  return st;
}

int td_cmd_inspect_tokens(const td_options *o) {
  td_err err;
  td_tokenizer *tok = NULL;
  td_buf text = TD_BUF_INIT;
  td_status st = td_cmd_need_model(o, &err);
  if (st == TD_OK) st = td_tokenizer_open(&tok, o->model, &err);
  if (st == TD_OK) st = td_stdin_read(&text, MAX_INPUT_BYTES, &err);
  if (st == TD_OK) st = o->decode ? print_decoded(tok, &text, &err) : print_ids(tok, &text, &err);
  td_buf_free(&text);
  td_tokenizer_close(tok);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}

int td_cmd_inspect_template(const td_options *o) {
  td_err err;
  td_buf vars = TD_BUF_INIT, out = TD_BUF_INIT;
  td_status st = TD_OK;
  if (!o->input || (!o->model && !o->template_file)) {
    st = td_fail(&err, TD_EINVAL,
                 "tandem inspect template needs --input FILE and --model DIR or --template FILE");
  } else if (!strcmp(o->input, "-")) {
    st = td_stdin_read(&vars, MAX_INPUT_BYTES, &err);
  } else {
    st = td_file_read(&vars, o->input, MAX_INPUT_BYTES, &err);
  }
  if (st == TD_OK)
    st = td_chat_render(o->template_file, o->model, td_buf_text(&vars), vars.len, &out, &err);
  if (st == TD_OK) st = print_text(&out, &err);
  td_buf_free(&vars);
  td_buf_free(&out);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
