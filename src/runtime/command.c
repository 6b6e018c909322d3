// src/runtime/command.c - what subcommands share: checked session options, reading --file.
#include "runtime/command.h"

#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "tandem/formats.h"
#include "text/chat.h"

#define MAX_TEXT_BYTES (1u << 30)

int td_cmd_fail(const td_err *err) {
  td_error("%s", err->msg);
  return err->code == TD_EINVAL ? 2 : 1;
}

td_status td_cmd_need_model(const td_options *options, td_err *err) {
  if (options->model) return TD_OK;
  return td_fail(
      err, TD_EINVAL,
      "tandem %s needs a model: --model DIR, a checkpoint's directory, a GGUF file, or ORG/NAME of "
      "the hub; `tandem recommend` lists some",
      td_command_name(options->command));
}

static const td_dtype kv_dtypes[] = {
#define X(id, name) TD_##id,
    TD_KV_DTYPES(X)
#undef X
};

td_dtype td_cmd_kv_dtype(const td_options *o) {
  return kv_dtypes[o->kv_dtype];
}

static td_runtime_opts runtime_of(const td_options *o) {
  td_runtime_opts r;
#define X(field, option) r.field = td_options_text(o, option);
  TD_RUNTIME_TEXTS(X)
#undef X
#define X(type, field, option, least, most, in_kv) r.field = (type)td_options_number(o, option);
  TD_RUNTIME_NUMBERS(X)
#undef X
  r.kv_dtype = td_cmd_kv_dtype(o);
  // without such a GPU an error says why, instead of a CPU that does not round so
  const bool needs_gpu = r.activations == TD_ACTIVATIONS_FP8 && strcmp(r.device, "auto") == 0;
  if (needs_gpu) r.device = "cuda";
  return r;
}

td_status td_cmd_session_opts(const td_options *o, td_session_opts *out, td_err *err) {
  *out = (td_session_opts){.runtime = runtime_of(o), .arena_gib = o->weights.gib};
  const uint32_t ctx_size = out->runtime.ctx_size;
  td_status st = td_placement_check(&out->runtime, err);
  if (st == TD_OK) st = td_cmd_need_model(o, err);
  td_model_config config; // fails early if the directory holds no model
  if (st == TD_OK) st = td_model_config_read(&config, o->model, err);
  if (st == TD_OK && ctx_size > config.max_position) {
    st = td_fail(err, TD_EINVAL, "--ctx-size %u: the model's longest context is %u tokens",
                 ctx_size, config.max_position);
  }
  return st;
}

td_status td_cmd_read_ids(const td_options *o, td_token_ids *ids, td_err *err) {
  td_status need = td_cmd_need_model(o, err);
  if (need != TD_OK) return need;
  if (!o->file)
    return td_fail(err, TD_EINVAL, "tandem %s needs --file FILE", td_command_name(o->command));
  td_buf text = TD_BUF_INIT;
  td_chat *chat = NULL;
  td_status st = !strcmp(o->file, "-") ? td_stdin_read(&text, MAX_TEXT_BYTES, err)
                                       : td_file_read(&text, o->file, MAX_TEXT_BYTES, err);
  if (st == TD_OK) st = td_chat_open(&chat, o->model, err);
  if (st == TD_OK) st = td_chat_encode_plain(chat, td_buf_text(&text), text.len, true, ids, err);
  td_chat_close(chat);
  td_buf_free(&text);
  return st;
}

td_status td_cmd_window(const td_options *o, uint32_t *out, td_err *err) {
  td_model_config config;
  *out = (uint32_t)o->ctx_size;
  if (*out) return TD_OK;
  td_status st = td_model_config_read(&config, o->model, err);
  *out = st == TD_OK && config.max_position < 2048 ? config.max_position : 2048;
  return st;
}
