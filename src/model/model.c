// src/model/model.c - opens a model: configuration, tensors, conversion; counts its parameters and
// bytes.
#include "model/model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem_info.h"
#include "base/units.h"
#include "gguf/files.h"
#include "model/a8.h"
#include "model/checkpoint/resident.h"
#include "model/convert.h"
#include "model/families/family.h"
#include "model/tensor_bind.h"

struct td_model {
  td_model_config config;
  td_store *store;
  td_quant *quant;
  td_conversion *conversion; // for a store that maps files
  void *converted;           // result of the conversion, td_conversion_bytes long
  bool is_converted;         // false: converted has no data yet
  td_bound_tensors binding;
  td_model_stats stats;
  char *dir, *name;
  const void *memory; // for a model without a store
  size_t n_bytes;
};

// The fraction part/whole of a matrix that one token uses.
typedef struct {
  uint32_t part, whole;
} share;

static void count(td_model_stats *s, td_dtype dtype, uint64_t bytes, share used) {
  s->bytes += bytes;
  s->active_bytes += bytes * used.part / used.whole;
  s->bytes_by_dtype[dtype] += bytes;
}

static void count_weight(td_model_stats *s, const td_weight *w, share used) {
  uint64_t n = (uint64_t)w->rows * w->cols;
  count(s, w->dtype, td_weight_data_bytes(w), used);
  count(s, w->scale_dtype, td_weight_scale_bytes(w), used);
  count(s, TD_I32, td_weight_zero_bytes(w), used);
  s->params += n;
  s->active_params += n * used.part / used.whole;
}

static void count_a8(td_model_stats *s, const td_weight *w, share used, bool is_expert) {
  if (!w->rows) return; // shares memory with another
  s->n_matrices++;
  const td_activations a8 = td_weight_a8(w);
  if (a8 == TD_ACTIVATIONS_AUTO) return;
  const uint64_t n = (uint64_t)w->rows * w->cols;
  s->a8[a8].n_matrices++;
  if (!is_expert) s->a8[a8].params += n;
  s->a8[a8].active_params += n * used.part / used.whole;
}

// Counts the weights bound to one field of object.
static void count_place(td_model_stats *s, const td_model_config *c, const td_tensor_spec *p,
                        const void *object) {
  const void *field = (const char *)object + p->offset;
  share all = {1, 1};
  uint64_t n = td_dim_value(c, p->rows);
  switch (p->kind) {
  case TD_SPEC_WEIGHT:
  case TD_SPEC_LATENT:
    count_a8(s, field, all, false);
    count_weight(s, field, all);
    return;
  case TD_SPEC_ROUTER:
  case TD_SPEC_SCORES: count_weight(s, field, all); return;
  case TD_SPEC_PATCH:
  case TD_SPEC_PLAIN: // embedding: a token reads one row, unless it is also the output matrix
    count_weight(s, field, (share){c->tie_embeddings, 1});
    return;
  case TD_SPEC_EXPERT:
    s->expert_bytes -= s->bytes;
    for (uint32_t e = 0; e < c->n_experts; e++) {
      const td_weight *w = &(*(td_weight *const *)field)[e];
      const share used = {c->top_k, c->n_experts};
      count_a8(s, w, used, true);
      count_weight(s, w, used);
    }
    s->expert_bytes += s->bytes;
    return;
  case TD_SPEC_VEC:
  case TD_SPEC_NORM_BY_DIM:
  case TD_SPEC_NORM1: {
    td_dtype dtype = ((const td_vec *)field)->dtype;
    count(s, dtype, n * td_dtype_bytes(dtype), all);
    break;
  }
  case TD_SPEC_EXPERT_BIAS:
    n *= c->n_experts * (p->alias[0] ? 2 : 1);
    count(s, TD_F32, n * sizeof(float), all);
    break;
  case TD_SPEC_TABLE: // of ids, not of parameters
    s->bytes += n * td_dim_value(c, p->cols) * sizeof(int32_t);
    return;
  case TD_SPEC_NGRAMS: {
    const td_ngram_table *table = field;
    for (uint32_t i = 0; i < table->n_shards; i++) {
      s->table_bytes += td_weight_data_bytes(&table->shards[i]);
      s->params += (uint64_t)table->shards[i].rows * table->shards[i].cols;
    }
    return;
  }
  case TD_SPEC_F32:
  case TD_SPEC_CONV:
    n *= td_dim_value(c, p->cols);
    count(s, TD_F32, n * sizeof(float), all);
    break;
  }
  s->params += n;
  s->active_params += n;
}

static void count_layer(td_model_stats *s, const td_model *m, uint32_t layer_idx) {
  const td_family *family = m->config.family;
  const uint64_t met = td_layer_conditions(&m->config, layer_idx);
  for (size_t i = 0; i < family->n_layer; i++) {
    const td_tensor_spec *p = &family->layer[i];
    if (!(p->conditions & ~met)) count_place(s, &m->config, p, &m->binding.layers[layer_idx]);
  }
}

static uint64_t n_params(const td_model_config *c, const td_tensor_spec *places, size_t n) {
  uint64_t sum = 0;
  for (size_t i = 0; i < n; i++)
    if (!(places[i].conditions & ~td_vision_conditions(c)))
      sum += (uint64_t)td_dim_value(c, places[i].rows) * td_dim_value(c, places[i].cols);
  return sum;
}

// The whole tower has the dtype of its first matrix; in an outline, BF16.
static void count_tower(td_model_stats *s, const td_model *m) {
  const td_model_config *c = &m->config;
  const td_tower *tower = c->vision.tower;
  const td_weight *first = &m->binding.vision.patch;
  if (!c->vision.n_layers) return;
  s->vision_params = n_params(c, tower->whole, tower->n_whole) +
                     c->vision.n_layers * n_params(c, tower->layer, tower->n_layer) +
                     c->vision.n_deep * n_params(c, tower->merger, tower->n_merger);
  s->vision_bytes = s->vision_params * td_dtype_bytes(first->data ? first->dtype : TD_BF16);
}

static td_model_stats count_all(const td_model *m) {
  td_model_stats s = {0};
  const uint64_t met = td_end_conditions(&m->config);
  for (size_t i = 0; i < td_n_end_places; i++) {
    const td_tensor_spec *p = &td_end_places[i];
    if (!(p->conditions & ~met)) count_place(&s, &m->config, p, &m->binding.ends);
  }
  for (uint32_t layer = 0; layer < m->config.n_layers; layer++)
    count_layer(&s, m, layer);
  count_tower(&s, m);
  return s;
}

// Removes the last component of a path and returns it.
static char *cut_last(char *path) {
  char *slash = strrchr(path, '/');
  if (!slash) return path;
  *slash = '\0';
  return slash + 1;
}

// Turns "models--Qwen--Qwen3-30B-A3B" into "Qwen/Qwen3-30B-A3B".
static char *name_of_repository(const char *folder) {
  char *name = strdup(folder + strlen("models--"));
  for (char *at = name; at && (at = strstr(at, "--"));) {
    *at++ = '/';
    memmove(at, at + 1, strlen(at));
  }
  return name;
}

char *td_dir_model_name(const char *dir) {
  if (td_gguf_is(dir)) return td_gguf_model_name(dir);
  char *path = realpath(dir, NULL);
  if (!path) return errno == ENOMEM ? NULL : strdup("model");
  const char *last = cut_last(path);
  char *name = NULL;
  if (strcmp(cut_last(path), "snapshots") == 0) {
    const char *folder = cut_last(path);
    if (strncmp(folder, "models--", 8) == 0 && folder[8]) name = name_of_repository(folder);
  }
  if (!name) name = strdup(last[0] ? last : "model");
  free(path);
  return name;
}

// Adds tensors that need conversion to the store, without data.
static td_status plan_conversion(td_model *m, td_err *err) {
  td_status st = td_conversion_open(&m->conversion, m->store, m->quant, err);
  size_t n_bytes = (size_t)td_conversion_memory_bytes(m->conversion);
  if (st != TD_OK || !n_bytes) return st;
  void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return td_fail(err, TD_ENOMEM, "%s: out of memory", m->dir);
  m->converted = memory;
  td_conversion_place(m->conversion, m->store, memory);
  const size_t n_shard_bytes = (size_t)td_conversion_bytes(m->conversion);
  if (!n_shard_bytes) return TD_OK;
  td_conversion_write_header(m->conversion, memory);
  return td_store_add_converted(m->store, memory, n_shard_bytes, err);
}

td_status td_model_convert(td_model *m, td_err *err) {
  uint64_t n_bytes = td_conversion_memory_bytes(m->conversion);
  if (!n_bytes || m->is_converted) return TD_OK;
  uint64_t available = td_memory_available_bytes();
  if (n_bytes > available) {
    return td_fail(err, TD_ENOMEM,
                   "%s: %s of converted weights do not fit into the %s of memory "
                   "available",
                   m->dir, td_size(n_bytes).text, td_size(available).text);
  }
  m->is_converted = true;
  return td_conversion_run(m->conversion, m->converted, NULL, err);
}

static td_status open_parts(td_model *m, const char *dir, int weights_fd, td_err *err) {
  td_status st = td_model_config_read(&m->config, dir, err);
  if (st != TD_OK) return st;
  for (const char *const *key = m->config.ignored; *key; key++) {
    td_warn("%s/config.json: %s is ignored: the reference of %s has no such key", dir, *key,
            m->config.arch_name);
  }
  const td_model_config *c = &m->config;
  if (td_gguf_is(dir) && c->family->defaults.query_beta > 0 && c->query_beta == 0) {
    td_warn("%s: has no metadata attention.temperature_scale: queries beyond position %u are not "
            "scaled as %s was trained with; convert it anew, or load the checkpoint it was made of",
            dir, c->family->defaults.query_span, c->arch_name);
  }
  m->dir = strdup(dir);
  m->name = td_dir_model_name(dir);
  if (!m->dir || !m->name) return td_fail(err, TD_ENOMEM, "%s: out of memory", dir);
  st = td_quant_open_dir(&m->quant, dir, err);
  if (st == TD_OK) {
    st = weights_fd < 0 ? td_store_open(&m->store, dir, err)
                        : td_store_open_resident(&m->store, dir, weights_fd, err);
  }
  if (st == TD_OK && weights_fd < 0) st = plan_conversion(m, err);
  if (st == TD_OK) st = td_bind(&m->binding, &m->config, m->quant, m->store, err);
  if (st == TD_OK) m->stats = count_all(m);
  return st;
}

typedef struct {
  const char *dir;
  td_resident resident;
} kept_dir;

static const void *find_kept(void *ctx, const char *path, size_t *n_bytes) {
  const kept_dir *kept = ctx;
  const char *slash = td_gguf_is(kept->dir) ? strrchr(kept->dir, '/') : NULL;
  size_t len = slash ? (size_t)(slash - kept->dir) : strlen(kept->dir);
  if (strncmp(path, kept->dir, len) != 0 || path[len] != '/') return NULL;
  return td_resident_find(&kept->resident, path + len + 1, n_bytes);
}

// With resident weights the files are not read: they may have been deleted or replaced.
static td_status open_model(td_model *m, const char *dir, int weights_fd, td_err *err) {
  if (weights_fd < 0) return open_parts(m, dir, weights_fd, err);
  kept_dir kept = {.dir = dir};
  td_status st = td_resident_attach(&kept.resident, weights_fd, err);
  if (st != TD_OK) return st;
  td_file_keep(&(td_file_kept){.find = find_kept, .ctx = &kept});
  st = open_parts(m, dir, weights_fd, err);
  td_file_keep(NULL);
  td_resident_detach(&kept.resident);
  return st;
}

static td_status open_new(td_model **out, const char *dir, int weights_fd, bool converts,
                          td_err *err) {
  td_err local;
  if (!err) err = &local;
  *out = NULL;
  td_model *m = calloc(1, sizeof *m);
  if (!m) return td_fail(err, TD_ENOMEM, "%s: out of memory", dir);
  td_status st = open_model(m, dir, weights_fd, err);
  if (st == TD_OK && converts) st = td_model_convert(m, err);
  if (st == TD_OK) {
    *out = m;
  } else {
    td_checkpoint_name_error(dir, err);
    td_model_close(m);
  }
  return st;
}

td_status td_model_open(td_model **out, const char *dir, td_err *err) {
  return open_new(out, dir, -1, true, err);
}

td_status td_model_open_weights(td_model **out, const char *dir, int weights_fd, td_err *err) {
  return open_new(out, dir, weights_fd, true, err);
}

td_status td_model_open_shapes(td_model **out, const char *dir, td_err *err) {
  return open_new(out, dir, -1, false, err);
}

td_status td_model_assemble(td_model **out, const td_model_config *config,
                            const td_model_parts *parts, td_err *err) {
  const size_t n_bytes = (config->n_layers + (parts->mtp != NULL)) * sizeof *parts->layers;
  td_model *m = *out = calloc(1, sizeof *m);
  if (m) {
    m->config = *config;
    m->dir = strdup("");
    m->name = strdup(parts->name ? parts->name : config->arch_name);
    m->binding.layers = malloc(n_bytes);
    m->binding.blocks = malloc(sizeof *m->binding.blocks);
  }
  if (!m || !m->dir || !m->name || !m->binding.layers || !m->binding.blocks) {
    td_model_close(m);
    *out = NULL;
    return td_fail(err, TD_ENOMEM, "out of memory: a model of %u layers", config->n_layers);
  }
  m->binding.blocks[m->binding.n_blocks++] = parts->owned;
  memcpy(m->binding.layers, parts->layers, n_bytes);
  m->binding.has_mtp = parts->mtp != NULL;
  if (parts->mtp) m->binding.mtp = *parts->mtp;
  m->binding.ends = (td_model_ends){
      .embed = parts->embed, .lm_head = parts->lm_head, .final_norm = parts->final_norm};
  m->memory = parts->memory;
  m->n_bytes = parts->n_bytes;
  m->stats = count_all(m);
  return TD_OK;
}

void td_model_close(td_model *model) {
  if (!model) return;
  td_binding_free(&model->binding);
  if (model->converted)
    munmap(model->converted, (size_t)td_conversion_memory_bytes(model->conversion));
  td_conversion_close(model->conversion);
  td_store_close(model->store);
  td_quant_close(model->quant);
  free(model->dir);
  free(model->name);
  free(model);
}

const void *td_model_memory(const td_model *model, size_t *n_bytes) {
  if (model->store) return td_store_memory(model->store, n_bytes);
  *n_bytes = model->n_bytes;
  return model->memory;
}

td_stripes td_model_stripes(const td_model *model) {
  return model->store ? td_store_stripes(model->store) : (td_stripes){.base = NULL};
}

const td_model_config *td_model_config_of(const td_model *model) {
  return &model->config;
}

const td_layer *td_model_layer(const td_model *model, uint32_t layer_idx) {
  TD_CHECK(layer_idx < model->config.n_layers + model->binding.has_mtp);
  return &model->binding.layers[layer_idx];
}

bool td_model_use_mtp(td_model *model) {
  model->config.n_draft_layers = model->binding.has_mtp;
  return model->binding.has_mtp;
}

const td_mtp *td_model_mtp(const td_model *model) {
  return model->binding.has_mtp ? &model->binding.mtp : NULL;
}

const td_vision_weights *td_model_vision(const td_model *model) {
  return model->binding.vision.layers ? &model->binding.vision : NULL;
}

const td_weight *td_model_embed(const td_model *model) {
  return &model->binding.ends.embed;
}

const td_hyper *td_model_head_hyper(const td_model *model) {
  return &model->binding.ends.hyper;
}

const td_weight *td_model_lm_head(const td_model *model) {
  const td_model_ends *ends = &model->binding.ends;
  return model->config.tie_embeddings ? &ends->embed : &ends->lm_head;
}

td_vec td_model_final_norm(const td_model *model) {
  return model->binding.ends.final_norm;
}

uint64_t td_model_expert_bytes(const td_model *model, uint32_t layer_idx) {
  const td_layer *layer = &model->binding.layers[layer_idx];
  uint64_t n = 0;
  for (uint32_t e = 0; layer->is_moe && e < model->config.n_experts; e++) {
    n += td_weight_bytes(&layer->gate[e]) + td_weight_bytes(&layer->down[e]);
    if (layer->up) n += td_weight_bytes(&layer->up[e]);
  }
  return n;
}

uint64_t td_model_mtp_bytes(const td_model *model, bool has_experts) {
  if (!model->binding.has_mtp) return 0;
  td_model_stats s = {0};
  count_layer(&s, model, model->config.n_layers);
  const td_mtp *mtp = &model->binding.mtp;
  return s.bytes - (has_experts ? 0 : s.expert_bytes) + td_weight_bytes(&mtp->proj) +
         td_weight_bytes(&mtp->hidden_proj);
}

td_model_stats td_model_stats_of(const td_model *model) {
  return model->stats;
}

const td_store *td_model_store(const td_model *model) {
  return model->store;
}

const td_quant *td_model_quant(const td_model *model) {
  return model->quant;
}

const td_conversion *td_model_conversion(const td_model *model) {
  return model->conversion;
}

const char *td_model_dir(const td_model *model) {
  return model->dir;
}

const char *td_model_name(const td_model *model) {
  return model->name;
}

size_t td_model_n_tensors(const td_model *model) {
  return td_store_n_tensors(model->store);
}

td_tensor_info td_model_tensor(const td_model *model, size_t idx) {
  const td_tensor *t = td_store_tensor(model->store, idx);
  const char *slash = strrchr(t->file, '/');
  td_tensor_info info = {.name = t->name,
                         .file = slash ? slash + 1 : t->file,
                         .dtype = t->dtype,
                         .n_dims = t->n_dims,
                         .n_bytes = t->n_bytes};
  memcpy(info.shape, t->shape, sizeof info.shape);
  return info;
}
