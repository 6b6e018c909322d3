// src/model/checkpoint/store.c - opens a checkpoint's shards and indexes their tensors by name.
#include "model/checkpoint/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/grow.h"
#include "base/json_parse.h"
#include "gguf/files.h"
#include "model/checkpoint/gguf_shard.h"
#include "model/checkpoint/resident.h"

#define SINGLE_FILE     "model.safetensors"
#define INDEX_FILE      "model.safetensors.index.json"
#define CONVERTED_FILE  "weights in memory" // used in messages
#define MAX_INDEX_BYTES ((size_t)256 << 20)

typedef struct {
  char *path;         // owned; td_tensor.file of its tensors points here
  const char *file;   // path without the directory
  td_file_map map;    // the file, or a part of store->resident
  td_file_map tables; // the file, with resident weights, if tables of n-grams are in it
  td_safetensors st;
} shard;

struct td_store {
  char *dir, *listing;
  td_resident resident; // base is NULL when files are mapped
  shard **shards;       // allocated one by one: tensors keep pointers into them
  size_t n_shards, cap_shards;
  bool is_gguf;
  const td_gguf_arch *arch; // of a GGUF model, once its first part is read
  td_safetensors converted; // tensors converted at load time, borrowed
  const uint8_t *converted_bytes;
  size_t n_converted_bytes;
  const td_tensor **tensors; // of all shards, then converted
  size_t n_tensors;
  uint32_t *slots; // hash table: 1 + index into tensors, 0 free; linear probing
  size_t slot_mask;
};

static td_status no_memory(const td_store *store, td_err *err) {
  return td_fail(err, TD_ENOMEM, "%s: out of memory", store->dir);
}

static char *join(const char *dir, const char *file) {
  char *path = NULL;
  return asprintf(&path, "%s/%s", dir, file) < 0 ? NULL : path;
}

static void shard_close(const td_store *store, shard *s) {
  td_safetensors_free(&s->st);
  if (!store->resident.base) td_file_map_close(&s->map);
  td_file_map_close(&s->tables);
  free(s->path);
  free(s);
}

static td_status shard_map(shard *s, const td_store *store, td_err *err) {
  if (!store->resident.base) return td_file_map_open(&s->map, s->path, err);
  s->map.data = td_resident_find(&store->resident, s->file, &s->map.n_bytes);
  if (s->map.data) return TD_OK;
  return td_fail(err, TD_EFORMAT,
                 "%s: not among the weights in memory: the checkpoint has changed since they were "
                 "loaded, start the server again",
                 s->path);
}

// The first part names the architecture.
static td_status parse_gguf(shard *s, td_store *store, td_err *err) {
  td_gguf gguf;
  td_status st = td_gguf_parse(&gguf, s->map.data, s->map.n_bytes, s->path, err);
  if (st == TD_OK) st = td_gguf_check_part(&gguf, err);
  if (st == TD_OK && !store->arch) st = td_gguf_arch_of(&gguf, &store->arch, err);
  if (st == TD_OK) st = td_gguf_shard(&s->st, &gguf, store->arch, err);
  td_gguf_free(&gguf);
  return st;
}

bool td_store_is_table(const char *name) {
  return strstr(name, ".ngram_embedding.") != NULL;
}

// Tables of n-grams in the file itself, of a shard that is in memory but for them.
static td_status map_tables(shard *s, td_err *err) {
  for (size_t i = 0; i < s->st.n_tensors; i++) {
    td_tensor *t = &s->st.tensors[i];
    if (!td_store_is_table(t->name)) continue;
    td_status st = s->tables.data ? TD_OK : td_file_map_disk(&s->tables, s->path, err);
    if (st != TD_OK) return st;
    if (s->tables.n_bytes != s->map.n_bytes) {
      return td_fail(err, TD_EFORMAT,
                     "%s: the checkpoint has changed since it was loaded, start the server again",
                     s->path);
    }
    t->data = (const uint8_t *)s->tables.data + (t->data - (const uint8_t *)s->map.data);
  }
  return TD_OK;
}

static td_status shard_open(shard **out, td_store *store, const char *file, td_err *err) {
  shard *s = calloc(1, sizeof *s);
  if (!s || !(s->path = join(store->dir, file))) {
    free(s);
    return no_memory(store, err);
  }
  s->file = s->path + strlen(store->dir) + 1;
  td_status st = shard_map(s, store, err);
  if (st == TD_OK) {
    st = store->is_gguf ? parse_gguf(s, store, err)
                        : td_safetensors_parse(&s->st, s->map.data, s->map.n_bytes, s->path, err);
  }
  if (st == TD_OK && store->resident.base) st = map_tables(s, err);
  if (st != TD_OK) {
    shard_close(store, s);
    return st;
  }
  *out = s;
  return TD_OK;
}

static td_status add_shard(td_store *store, const char *file, td_err *err) {
  if (!TD_GROW(store->shards, store->n_shards, store->cap_shards, 16)) return no_memory(store, err);
  td_status st = shard_open(&store->shards[store->n_shards], store, file, err);
  if (st == TD_OK) store->n_shards++;
  return st;
}

// File name of an index entry, checked to have no directory part.
static td_status index_file(const td_store *store, const cJSON *entry, const char **file,
                            td_err *err) {
  const char *name = cJSON_GetStringValue(entry);
  if (!name || !*name) {
    return td_fail(err, TD_EFORMAT, "%s: tensor %s: weight_map gives no file name for it",
                   store->listing, entry->string);
  }
  if (strchr(name, '/')) {
    return td_fail(err, TD_EFORMAT,
                   "%s: tensor %s: file name \"%s\" leads out of the directory, which is refused",
                   store->listing, entry->string, name);
  }
  *file = name;
  return TD_OK;
}

static bool has_shard(const td_store *store, const char *file) {
  // Consecutive entries are usually in the same shard, the one opened last.
  for (size_t i = store->n_shards; i-- > 0;)
    if (strcmp(store->shards[i]->file, file) == 0) return true;
  return false;
}

static td_status open_indexed_shards(td_store *store, const cJSON *weight_map, td_err *err) {
  for (const cJSON *entry = weight_map->child; entry; entry = entry->next) {
    const char *file = NULL;
    td_status st = index_file(store, entry, &file, err);
    if (st != TD_OK) return st;
    if (has_shard(store, file)) continue;
    st = add_shard(store, file, err);
    if (st == TD_ENOENT) {
      return td_fail(err, TD_ENOENT,
                     "%s/%s: no such file, but %s says that it holds tensor %s: the checkpoint is "
                     "incomplete, download the file",
                     store->dir, file, INDEX_FILE, entry->string);
    }
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static uint64_t hash_name(const char *name) {
  uint64_t h = 14695981039346656037u; // FNV-1a
  for (; *name; name++)
    h = (h ^ (unsigned char)*name) * 1099511628211u;
  return h ^ h >> 32;
}

// The slot that holds name, or the free slot for it.
static size_t find_slot(const td_store *store, const char *name) {
  size_t i = hash_name(name) & store->slot_mask;
  while (store->slots[i] && strcmp(store->tensors[store->slots[i] - 1]->name, name) != 0)
    i = (i + 1) & store->slot_mask;
  return i;
}

static td_status add_to_map(td_store *store, const td_tensor *t, td_err *err) {
  size_t slot = find_slot(store, t->name);
  if (store->slots[slot]) {
    return td_tensor_fail(err, TD_EFORMAT, t, "also in %s: only one shard may hold it",
                          store->tensors[store->slots[slot] - 1]->file);
  }
  store->tensors[store->n_tensors++] = t;
  store->slots[slot] = (uint32_t)store->n_tensors;
  return TD_OK;
}

static td_status add_all(td_store *store, const td_safetensors *st, td_err *err) {
  for (size_t i = 0; i < st->n_tensors; i++) {
    td_status status = add_to_map(store, &st->tensors[i], err);
    if (status != TD_OK) return status;
  }
  return TD_OK;
}

// Builds the hash table, replacing an existing one.
static td_status build_map(td_store *store, td_err *err) {
  size_t n = store->converted.n_tensors;
  for (size_t i = 0; i < store->n_shards; i++)
    n += store->shards[i]->st.n_tensors;
  if (n >= UINT32_MAX / 4)
    return td_fail(err, TD_ELIMIT, "%s: %zu tensors are too many", store->listing, n);
  size_t n_slots = 16;
  while (n_slots < 2 * n)
    n_slots *= 2;
  store->slot_mask = n_slots - 1;
  store->n_tensors = 0;
  free(store->slots);
  free(store->tensors);
  store->slots = calloc(n_slots, sizeof *store->slots);
  store->tensors = calloc(n + 1, sizeof *store->tensors);
  if (!store->slots || !store->tensors) return no_memory(store, err);
  td_status status = TD_OK;
  for (size_t i = 0; i < store->n_shards && status == TD_OK; i++)
    status = add_all(store, &store->shards[i]->st, err);
  return status == TD_OK ? add_all(store, &store->converted, err) : status;
}

// Checks that every tensor is in the shard that the index names.
static td_status check_index(const td_store *store, const cJSON *weight_map, td_err *err) {
  for (const cJSON *entry = weight_map->child; entry; entry = entry->next) {
    ptrdiff_t idx = td_store_find(store, entry->string);
    const char *where = idx < 0 ? "no shard" : store->tensors[idx]->file + strlen(store->dir) + 1;
    if (idx < 0 || strcmp(where, entry->valuestring) != 0) {
      return td_fail(err, TD_EFORMAT,
                     "%s: tensor %s: said to be in %s, but %s has it: index and shards do not "
                     "belong together, download them again",
                     store->listing, entry->string, entry->valuestring, where);
    }
  }
  return TD_OK;
}

static td_status open_index(td_store *store, td_err *err) {
  cJSON *index;
  td_status st = td_json_parse_regular(&index, store->listing, MAX_INDEX_BYTES, err);
  if (st != TD_OK) return st;
  const cJSON *weight_map = td_json_get(index, "weight_map");
  if (!cJSON_IsObject(weight_map))
    st = td_fail(err, TD_EFORMAT, "%s: has no object \"weight_map\"", store->listing);
  if (st == TD_OK) st = open_indexed_shards(store, weight_map, err);
  if (st == TD_OK) st = build_map(store, err);
  if (st == TD_OK) st = check_index(store, weight_map, err);
  cJSON_Delete(index);
  return st;
}

// store->dir is the folder of the file.
static td_status open_gguf(td_store *store, const char *model, td_err *err) {
  td_status st = TD_OK;
  char *slash = strrchr(store->dir, '/');
  if (slash)
    *slash = '\0';
  else
    strcpy(store->dir, ".");
  if (!(store->listing = strdup(model))) return no_memory(store, err);
  const uint32_t n = td_gguf_n_parts(model);
  for (uint32_t i = 0; i < n && st == TD_OK; i++) {
    char *path = td_gguf_part_path(model, i, n);
    if (!path) return no_memory(store, err);
    const char *last = strrchr(path, '/');
    st = add_shard(store, last ? last + 1 : path, err);
    free(path);
  }
  return st == TD_OK ? build_map(store, err) : st;
}

static td_status open_dir(td_store *store, td_err *err) {
  if (!(store->listing = join(store->dir, SINGLE_FILE))) return no_memory(store, err);
  if (td_file_exists(store->listing)) {
    td_status st = add_shard(store, SINGLE_FILE, err);
    return st == TD_OK ? build_map(store, err) : st;
  }
  free(store->listing);
  if (!(store->listing = join(store->dir, INDEX_FILE))) return no_memory(store, err);
  if (!td_file_exists(store->listing)) {
    return td_fail(err, TD_ENOENT,
                   "%s: has neither %s nor %s: give the directory of a checkpoint in safetensors "
                   "format",
                   store->dir, SINGLE_FILE, INDEX_FILE);
  }
  return open_index(store, err);
}

td_status td_store_add_converted(td_store *store, const void *bytes, size_t n_bytes, td_err *err) {
  td_status st = td_safetensors_parse(&store->converted, bytes, n_bytes, CONVERTED_FILE, err);
  if (st != TD_OK) return st;
  store->converted_bytes = bytes;
  store->n_converted_bytes = n_bytes;
  return build_map(store, err);
}

void td_store_place(td_store *store, const td_tensor *t, const void *data) {
  (void)store; // which owns the tensor
  ((td_tensor *)t)->data = data;
}

bool td_store_is_converted(const td_store *store, const td_tensor *t) {
  return store->converted_bytes && t->data >= store->converted_bytes &&
         t->data <= store->converted_bytes + store->n_converted_bytes;
}

static td_status open_store(td_store **out, const char *dir, int weights_fd, td_err *err) {
  *out = NULL;
  td_store *store = calloc(1, sizeof *store);
  if (!store || !(store->dir = strdup(dir))) {
    free(store);
    return td_fail(err, TD_ENOMEM, "%s: out of memory", dir);
  }
  td_status st = weights_fd < 0 ? TD_OK : td_resident_attach(&store->resident, weights_fd, err);
  store->is_gguf = td_gguf_is(dir);
  if (st == TD_OK) st = store->is_gguf ? open_gguf(store, dir, err) : open_dir(store, err);
  size_t n_bytes;
  const void *converted = NULL;
  if (st == TD_OK && store->resident.base)
    converted = td_resident_find(&store->resident, TD_RESIDENT_CONVERTED, &n_bytes);
  if (converted) st = td_store_add_converted(store, converted, n_bytes, err);
  if (st != TD_OK) {
    td_store_close(store);
    return st;
  }
  *out = store;
  return TD_OK;
}

td_status td_store_open(td_store **out, const char *dir, td_err *err) {
  return open_store(out, dir, -1, err);
}

td_status td_store_open_resident(td_store **out, const char *dir, int weights_fd, td_err *err) {
  return open_store(out, dir, weights_fd, err);
}

void td_store_close(td_store *store) {
  if (!store) return;
  for (size_t i = 0; i < store->n_shards; i++)
    shard_close(store, store->shards[i]);
  td_safetensors_free(&store->converted);
  td_resident_detach(&store->resident);
  free(store->shards);
  free(store->tensors);
  free(store->slots);
  free(store->listing);
  free(store->dir);
  free(store);
}

size_t td_store_n_tensors(const td_store *store) {
  return store->n_tensors;
}

const td_tensor *td_store_tensor(const td_store *store, size_t idx) {
  TD_CHECK(idx < store->n_tensors);
  return store->tensors[idx];
}

ptrdiff_t td_store_find(const td_store *store, const char *name) {
  return (ptrdiff_t)store->slots[find_slot(store, name)] - 1;
}

const char *td_store_listing(const td_store *store) {
  return store->listing;
}

size_t td_store_n_shards(const td_store *store) {
  return store->n_shards;
}

uint64_t td_store_table_bytes(const td_store *store) {
  uint64_t n_bytes = 0;
  for (size_t i = 0; i < store->n_tensors; i++)
    if (td_store_is_table(store->tensors[i]->name)) n_bytes += store->tensors[i]->n_bytes;
  return n_bytes;
}

td_shard_info td_store_shard(const td_store *store, size_t idx) {
  TD_CHECK(idx < store->n_shards);
  const shard *s = store->shards[idx];
  return (td_shard_info){
      .path = s->path, .name = s->file, .n_bytes = s->map.n_bytes, .bytes = s->map.data};
}

td_stripes td_store_stripes(const td_store *store) {
  return td_resident_stripes(&store->resident);
}

const void *td_store_memory(const td_store *store, size_t *n_bytes) {
  *n_bytes = store->resident.n_bytes;
  return store->resident.base;
}
