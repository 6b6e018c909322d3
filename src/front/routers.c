// src/front/routers.c - what routers ask under SGLang's names: which model, and how much it has to
// do. ?model= chooses one of several models. There is one rank, dp_rank 0.
#include "front/serve_impl.h"

typedef struct {
  uint32_t n_running, n_waiting, n_places;
  uint64_t n_used, n_room; // tokens of the KV cache
} load;

static load load_of(const td_host *h) {
  load l = {.n_running = td_host_n_running(h),
            .n_waiting = td_host_n_waiting(h),
            .n_places = (uint32_t)h->options.max_batch};
  if (!h->backend) return l;
  const td_wire_ready info = td_backend_info(h->backend);
  l.n_room = (uint64_t)info.n_pages * info.page_tokens;
  l.n_used = (uint64_t)(td_backend_kv_use(h->backend) * (double)l.n_room + 0.5);
  return l;
}

static void begin_load(td_json_writer *w, const load *l) {
  td_jw_begin_object(w, NULL);
  td_jw_int(w, "dp_rank", 0);
  td_jw_int(w, "num_waiting_reqs", l->n_waiting);
}

static void write_load(td_json_writer *w, const load *l) {
  const double use = l->n_room ? (double)l->n_used / (double)l->n_room : 0;
  begin_load(w, l);
  td_jw_int(w, "num_running_reqs", l->n_running);
  td_jw_int(w, "num_total_reqs", l->n_running + l->n_waiting);
  td_jw_int(w, "num_used_tokens", (int64_t)l->n_used);
  td_jw_int(w, "max_total_num_tokens", (int64_t)l->n_room);
  td_jw_int(w, "max_running_requests", l->n_places);
  td_jw_double(w, "token_usage", use);
  td_jw_double(w, "utilization", (double)l->n_running / (double)l->n_places);
  td_jw_end_object(w);
}

typedef void write_fn(td_json_writer *w, const td_host *h);

static void respond(void *ctx, td_http_exchange *x, write_fn *write) {
  td_api_error error;
  const td_host *h = td_serve_queried_host(ctx, x, &error);
  if (!h) {
    td_serve_fail(x, &error);
    return;
  }
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  write(&w, h);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

static void write_loads(td_json_writer *w, const td_host *h) {
  const load l = load_of(h);
  td_jw_begin_object(w, NULL);
  td_serve_write_time(w, "timestamp", (int64_t)time(NULL));
  td_jw_str(w, "version", TD_VERSION);
  td_jw_int(w, "dp_rank_count", 1);
  td_jw_begin_array(w, "loads");
  write_load(w, &l);
  td_jw_end_array(w);
  td_jw_end_object(w);
}

static void write_short_loads(td_json_writer *w, const td_host *h) {
  const load l = load_of(h);
  td_jw_begin_array(w, NULL);
  begin_load(w, &l);
  td_jw_int(w, "num_reqs", l.n_running + l.n_waiting);
  td_jw_int(w, "num_tokens", (int64_t)l.n_used);
  td_jw_end_object(w);
  td_jw_end_array(w);
}

static void write_names(td_json_writer *w, const td_host *h) {
  td_jw_str(w, "model_path", h->name);
  td_jw_str(w, "tokenizer_path", h->name);
  td_jw_str(w, "served_model_name", h->name);
  td_jw_str(w, "model_type", h->arch_name);
}

static void write_model_info(td_json_writer *w, const td_host *h) {
  td_jw_begin_object(w, NULL);
  write_names(w, h);
  td_jw_bool(w, "is_generation", true);
  td_jw_bool(w, "has_image_understanding", false);
  td_jw_bool(w, "has_audio_understanding", false);
  td_jw_end_object(w);
}

static void write_server_info(td_json_writer *w, const td_host *h) {
  const load l = load_of(h);
  td_jw_begin_object(w, NULL);
  write_names(w, h);
  td_jw_str(w, "version", TD_VERSION);
  td_jw_str(w, "status", td_host_state_name(td_host_state_of(h)));
  td_jw_int(w, "context_length", h->n_ctx);
  td_jw_int(w, "max_running_requests", l.n_places);
  td_jw_int(w, "max_total_num_tokens", (int64_t)l.n_room);
  td_jw_int(w, "tp_size", 1);
  td_jw_int(w, "dp_size", 1);
  td_jw_str(w, "disaggregation_mode", "null"); // of several servers
  td_jw_begin_array(w, "internal_states");
  write_load(w, &l);
  td_jw_end_array(w);
  td_jw_end_object(w);
}

#define HANDLER(name, write)                                                                       \
  void td_serve_##name(void *ctx, td_http_exchange *x) {                                           \
    respond(ctx, x, write);                                                                        \
  }

HANDLER(loads, write_loads)
HANDLER(plain_loads, write_loads)
HANDLER(get_load, write_short_loads)
HANDLER(model_info, write_model_info)
HANDLER(get_model_info, write_model_info)
HANDLER(server_info, write_server_info)
HANDLER(get_server_info, write_server_info)
