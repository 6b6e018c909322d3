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
  td_jw_add(w, "{'dp_rank': 0, 'num_waiting_reqs': %u", l->n_waiting);
}

static void write_load(td_json_writer *w, const load *l) {
  const double use = l->n_room ? (double)l->n_used / (double)l->n_room : 0;
  begin_load(w, l);
  td_jw_add(w,
            "'num_running_reqs': %u, 'num_total_reqs': %u, 'num_used_tokens': %lu, "
            "'max_total_num_tokens': %lu, 'max_running_requests': %u, 'token_usage': %g, "
            "'utilization': %g}",
            l->n_running, l->n_running + l->n_waiting, l->n_used, l->n_room, l->n_places, use,
            (double)l->n_running / (double)l->n_places);
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
  td_jw_add(w, "'version': %s, 'dp_rank_count': 1, 'loads': [", TD_VERSION);
  write_load(w, &l);
  td_jw_add(w, "]}");
}

static void write_short_loads(td_json_writer *w, const td_host *h) {
  const load l = load_of(h);
  td_jw_begin_array(w, NULL);
  begin_load(w, &l);
  td_jw_add(w, "'num_reqs': %u, 'num_tokens': %lu}]", l.n_running + l.n_waiting, l.n_used);
}

static void write_names(td_json_writer *w, const td_host *h) {
  td_jw_add(w, "'model_path': %s, 'tokenizer_path': %s, 'served_model_name': %s, 'model_type': %s",
            h->name, h->name, h->name, h->arch_name);
}

static void write_model_info(td_json_writer *w, const td_host *h) {
  td_jw_begin_object(w, NULL);
  write_names(w, h);
  td_jw_add(w, "'is_generation': true, 'has_image_understanding': false, "
               "'has_audio_understanding': false}");
}

static void write_server_info(td_json_writer *w, const td_host *h) {
  const load l = load_of(h);
  td_jw_begin_object(w, NULL);
  write_names(w, h);
  td_jw_add(w,
            "'version': %s, 'status': %s, 'context_length': %u, 'max_running_requests': %u, "
            "'max_total_num_tokens': %lu, 'tp_size': 1, 'dp_size': 1",
            TD_VERSION, td_host_state_name(td_host_state_of(h)), h->n_ctx, l.n_places, l.n_room);
  td_jw_str(w, "disaggregation_mode", "null"); // of several servers
  td_jw_begin_array(w, "internal_states");
  write_load(w, &l);
  td_jw_add(w, "]}");
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
