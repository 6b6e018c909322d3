// src/front/host_open.c - what is decided about a model before it is loaded: its configuration,
// defaults, device, and the number of its workers.
#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "engine/engine.h"
#include "front/serve_impl.h"
#include "gguf/files.h"
#include "runtime/command.h"
#include "runtime/gpu_probe.h"

#define MAX_TURN_BYTES (64u << 20) // of what is remembered of conversations

// The least of the GPUs of --devices. free_bytes 0: the model runs on the CPU.
static td_status find_gpu(const td_runtime_opts *wish, const td_model *model, td_gpu_facts *out,
                          td_err *err) {
  const td_model_stats stats = td_model_stats_of(model);
  td_device_list list;
  td_status st = td_device_list_parse(&list, wish->devices, err);
  if (st != TD_OK) return st;
  *out = (td_gpu_facts){.free_bytes = UINT64_MAX, .link_gbps = HUGE_VAL};
  for (uint32_t i = 0; i < list.n && st == TD_OK; i++) {
    td_gpu_facts gpu;
    st = td_gpu_probe(&gpu, list.index[i], td_placement_need_bytes(wish, &stats), err);
    if (gpu.free_bytes < out->free_bytes) out->free_bytes = gpu.free_bytes;
    if (gpu.link_gbps < out->link_gbps) out->link_gbps = gpu.link_gbps;
  }
  if (st == TD_OK) return TD_OK;
  out->free_bytes = 0;
  if (strcmp(wish->device, "auto") == 0) {
    td_info("no usable GPU (%s); running on the CPU", err->msg);
    return TD_OK;
  }
  return st == TD_ENOMEM && wish->experts == TD_EXPERTS_GPU
             ? td_err_prefix(err, "--expert-device gpu")
             : st;
}

// How much GPU memory is divided: what is found free when the model is first loaded, rounded so
// that the little that another start finds more or less changes nothing. It stays when the model is
// loaded again, unless less is free.
static uint64_t choose_gpu_bytes(td_host *h, uint64_t free_bytes) {
  enum { PARTS = 64 };
  uint32_t mib = (uint32_t)(free_bytes >> 20), step = 1;
  while (mib / PARTS / 2 >= step)
    step *= 2;
  mib -= mib % step;
  if (mib && (!h->gpu_mib || mib < h->gpu_mib)) h->gpu_mib = mib;
  return mib ? (uint64_t)h->gpu_mib << 20 : free_bytes;
}

// A checkpoint that cannot be opened is an error elsewhere.
void td_host_note_weights(td_host *h) {
  td_err ignored;
  td_model *model;
  if (h->n_params || td_model_open_shapes(&model, h->dir, &ignored) != TD_OK) return;
  const td_model_stats stats = td_model_stats_of(model);
  td_dtype most = 0;
  for (uint32_t i = 0; i < TD_N_DTYPES; i++)
    if (stats.bytes_by_dtype[i] > stats.bytes_by_dtype[most]) most = (td_dtype)i;
  h->dtype = td_dtype_name(most);
  if (!td_model_vision(model)) atomic_store(&h->sees, false);
  h->n_params = stats.params;
  td_model_close(model);
}

// Chooses the device and where experts run; resolves auto.
static td_status choose_placement(td_host *h, const td_model_config *config, td_err *err) {
  td_runtime_opts *m = &h->runtime;
  td_gpu_facts gpu = {.free_bytes = 0};
  td_model *model = NULL;
  td_status st = td_placement_check_model(m, config, err);
  if (st != TD_OK) return st;
  if (td_placement_may_use_gpu(m, config)) {
    st = td_model_open_shapes(&model, m->model_dir, err); // mapped, so nearly free
    if (st == TD_OK) st = find_gpu(m, model, &gpu, err);
    if (st == TD_OK) gpu.free_bytes = choose_gpu_bytes(h, gpu.free_bytes);
  }
  if (st == TD_OK) h->placement = td_placement_of(m, model, gpu.free_bytes);
  // Chosen here, so that every worker is given the same.
  if (st == TD_OK && !h->placement.experts_on_cpu)
    m->stream_from = 0;
  else if (st == TD_OK && !m->stream_from)
    m->stream_from = td_stream_from(model, m->n_threads, gpu.link_gbps);
  td_model_close(model);
  if (st != TD_OK) return st;
  m->device = h->placement.device;
  // On a GPU it depends on free GPU memory, and the worker chooses.
  if (!h->placement.is_discrete && !m->prefill_chunk)
    m->prefill_chunk = td_engine_prefill_chunk(config);
  return TD_OK;
}

// Whether a GPU for prefill and one for decode pay: where long prompts are slow, since their
// experts stream, and others may wait for tokens meanwhile.
static bool pays_to_split_gpus(const td_host *h, uint32_t n_gpus) {
  return n_gpus == 2 && h->placement.experts_on_cpu && h->options.max_batch > 1 &&
         h->options.expert_parallel != TD_ON;
}

static td_status choose_gpu_workers(td_host *h, const td_model_config *config, td_err *err) {
  const td_auto_on_off how = (td_auto_on_off)h->options.disaggregate;
  td_device_list list;
  td_status st = td_device_list_parse(&list, h->runtime.devices, err);
  if (st != TD_OK) return st;
  h->is_split = how == TD_AUTO ? pays_to_split_gpus(h, list.n) : how == TD_ON;
  if (h->is_split && list.n != 2) {
    return td_fail(
        err, TD_EINVAL,
        "--disaggregate on: with a GPU it takes two, one for prefill and one for decode: "
        "give --devices 0,1, or --device cpu");
  }
  if (h->is_split && h->options.expert_parallel == TD_ON) {
    return td_fail(
        err, TD_EINVAL,
        "--disaggregate on: with --expert-parallel on both GPUs prefill; give one of the "
        "two");
  }
  if (!h->is_split && h->options.kv_dir) {
    return td_fail(
        err, TD_EINVAL,
        "--kv-dir: with one worker on a GPU, KV pages are in the GPU's memory alone; give "
        "two GPUs (--devices 0,1 --disaggregate on) or --device cpu");
  }
  if (!h->is_split && list.n > 1 && !td_may_share_prompts(config)) {
    td_info("--devices: GPU %u computes alone, since prompts with recurrent states cannot be "
            "shared; --disaggregate on lets a second one prefill",
            list.index[0]);
  }
  if (!h->is_split) return TD_OK;
  td_info("two workers: GPU %u for prefill, GPU %u for decode", list.index[0], list.index[1]);
  return TD_OK;
}

// Chooses one worker, or two for prefill and decode.
static td_status choose_workers(td_host *h, const td_model_config *config, td_err *err) {
  const td_auto_on_off how = (td_auto_on_off)h->options.disaggregate;
  uint32_t n_threads = h->runtime.n_threads;
  if (h->placement.is_discrete) return choose_gpu_workers(h, config, err);
  h->is_split = how == TD_AUTO ? (n_threads ? n_threads : td_cpu_count()) > 1 : how == TD_ON;
  return TD_OK;
}

td_status td_host_place(td_host *h, td_err *err) {
  td_model_config config;
  h->runtime = h->wish;
  td_status st = td_model_config_read(&config, h->dir, err);
  if (st == TD_OK) st = choose_placement(h, &config, err);
  if (st == TD_OK) st = choose_workers(h, &config, err);
  h->is_placed = st == TD_OK;
  return st;
}

static td_status read_config(td_host *h, td_err *err) {
  td_model_config config;
  td_session_opts session;
  td_status st = td_cmd_session_opts(&h->options, &session, err);
  if (st == TD_OK) st = td_model_config_read(&config, h->dir, err);
  if (st == TD_OK) st = td_placement_check_model(&session.runtime, &config, err);
  if (st != TD_OK) return st;
  h->wish = session.runtime;
  h->defaults = (td_api_defaults){.temperature = config.temperature,
                                  .top_p = config.top_p,
                                  .top_k = config.top_k_sampling,
                                  .n_vocab = config.n_vocab};
  memcpy(h->arch_name, config.arch_name, sizeof h->arch_name);
  h->n_ctx = h->options.ctx_size ? (uint32_t)h->options.ctx_size : config.max_position;
  st = td_pictures_open(&h->pictures, h->dir, &config.vision, err);
  atomic_store(&h->sees, st == TD_OK);
  return st == TD_ENOENT ? TD_OK : st;
}

td_status td_host_open(td_host *h, td_serve *serve, const char *name, const char *dir,
                       td_err *err) {
  *h = (td_host){.serve = serve, .options = *serve->options, .weights_fd = -1};
  TD_CHECK(pthread_mutex_init(&h->chat_lock, NULL) == 0);
  td_metrics_init(&h->metrics);
  h->name = strdup(name);
  h->dir = strdup(dir);
  h->options.model = h->dir;
  td_status st = h->name && h->dir ? read_config(h, err) : td_fail(err, TD_ENOMEM, "out of memory");
  if (st == TD_OK) td_model_files_read(&h->files, h->dir);
  if (st == TD_OK) st = td_turns_open(&h->turns, MAX_TURN_BYTES, err);
  if (st != TD_OK) td_host_close(h);
  return st;
}

void td_host_close(td_host *h) {
  if (!h->serve) return;
  if (h->weights_fd >= 0) close(h->weights_fd);
  td_chat_close(h->chat);
  td_call_syntax_close(&h->calls);
  td_turns_close(h->turns);
  td_pictures_close(&h->pictures);
  free(h->name);
  free(h->dir);
  pthread_mutex_destroy(&h->chat_lock);
  *h = (td_host){0};
}

// Clients are told the model's name, not where its folder is.
static void name_folder(const td_host *h, td_err *err) {
  const size_t n_dir = strlen(h->dir), n_name = strlen(h->name);
  for (char *at; n_name <= n_dir && (at = strstr(err->msg, h->dir));) {
    memcpy(at, h->name, n_name);
    memmove(at + n_name, at + n_dir, strlen(at + n_dir) + 1);
  }
}

const td_chat *td_host_chat(td_host *h, td_err *err) {
  td_chat *chat = atomic_load(&h->chat);
  if (chat) return chat;
  pthread_mutex_lock(&h->chat_lock);
  chat = atomic_load(&h->chat);
  if (!chat && td_chat_open(&chat, h->dir, err) == TD_OK) {
    td_call_syntax_open(&h->calls, chat);
    atomic_store(&h->chat, chat);
  }
  pthread_mutex_unlock(&h->chat_lock);
  if (!chat && h->serve->options->models) name_folder(h, err);
  return chat;
}

// ---- files of a model ---------------------------------------------------------------------------

#define MAX_CONFIG_BYTES (1u << 24)

static bool ends_with(const char *name, const char *end) {
  const size_t n = strlen(name), n_end = strlen(end);
  return n > n_end && strcmp(name + n - n_end, end) == 0;
}

static int is_file(const struct dirent *entry) {
  static const char *const ends[] = {".safetensors", ".json", ".jinja", ".model"};
  for (size_t i = 0; i < TD_COUNT(ends); i++)
    if (ends_with(entry->d_name, ends[i])) return 1;
  return 0;
}

static void add_file(td_model_files *out, td_sha256 *sha, const char *dir, const char *name) {
  struct stat info;
  td_err ignored;
  td_buf path = TD_BUF_INIT, text = TD_BUF_INIT;
  td_buf_printf(&path, "%s/%s", dir, name);
  if (stat(td_buf_text(&path), &info) == 0 && S_ISREG(info.st_mode)) {
    const uint64_t n_bytes = (uint64_t)info.st_size;
    out->n_bytes += n_bytes;
    if (info.st_mtim.tv_sec > out->modified_s) out->modified_s = info.st_mtim.tv_sec;
    if (ends_with(name, ".safetensors") || td_gguf_is(name)) {
      td_sha256_add(sha, name, strlen(name) + 1);
      td_sha256_add(sha, &n_bytes, sizeof n_bytes);
    }
    if (strcmp(name, "config.json") == 0 &&
        td_file_read(&text, td_buf_text(&path), MAX_CONFIG_BYTES, &ignored) == TD_OK)
      td_sha256_add(sha, td_buf_text(&text), text.len);
  }
  td_buf_free(&path);
  td_buf_free(&text);
}

// The parts of a GGUF model, and the configuration that is in them.
static void add_gguf(td_model_files *out, td_sha256 *sha, const char *model) {
  const uint32_t n = td_gguf_n_parts(model);
  td_buf text = TD_BUF_INIT;
  td_err ignored;
  for (uint32_t i = 0; i < n; i++) {
    char *path = td_gguf_part_path(model, i, n), *slash = path ? strrchr(path, '/') : NULL;
    if (slash) *slash = '\0';
    if (path) add_file(out, sha, slash ? path : ".", slash ? slash + 1 : path);
    free(path);
  }
  if (td_checkpoint_read(&text, model, "config.json", MAX_CONFIG_BYTES, &ignored) == TD_OK)
    td_sha256_add(sha, td_buf_text(&text), text.len);
  td_buf_free(&text);
}

void td_model_files_read(td_model_files *out, const char *dir) {
  struct dirent **entries;
  td_sha256 sha;
  *out = (td_model_files){0};
  td_sha256_begin(&sha);
  if (td_gguf_is(dir)) add_gguf(out, &sha, dir);
  const int n = td_gguf_is(dir) ? -1 : scandir(dir, &entries, is_file, alphasort);
  for (int i = 0; i < n; i++) {
    add_file(out, &sha, dir, entries[i]->d_name);
    free(entries[i]);
  }
  if (n >= 0) free(entries);
  td_sha256_end(&sha, &out->digest);
}
