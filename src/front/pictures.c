// src/front/pictures.c - preparing images, their memory, and their tokens.
// The memory is one sparse file: every image gets a range of its own at the end, and its pages are
// given back when nobody needs them.
#include "front/pictures.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "shm/segment.h"

#define PAGE_BYTES 4096u
#define LEAD       7 // tokens in front of an image that its keys begin with

td_status td_pictures_open(td_pictures *out, const char *model_dir, const td_vision_config *vision,
                           td_err *err) {
  *out = (td_pictures){.token = vision->image_token};
  if (!vision->n_layers || vision->image_token < 0)
    return td_fail(err, TD_ENOENT, "the model does not see");
  td_status st = td_image_processor_read(&out->processor, model_dir, err);
  if (st == TD_EUNSUPPORTED) td_warn("images are not taken: %s", err->msg);
  if (st == TD_EUNSUPPORTED) st = TD_ENOENT;
  if (st == TD_OK &&
      (out->processor.patch != vision->patch || out->processor.merge != vision->merge)) {
    st = td_fail(err, TD_EFORMAT,
                 "%s: preprocessor_config.json has patches of %u pixels, %u a side of a token, "
                 "config.json of %u and %u",
                 model_dir, out->processor.patch, out->processor.merge, vision->patch,
                 vision->merge);
  }
  if (st == TD_OK) st = td_segment_reserve(&out->fd, "tandem-images", err);
  out->most = TD_PICTURES_BYTES;
  if (st != TD_OK) *out = (td_pictures){0};
  return st;
}

void td_pictures_close(td_pictures *p) {
  if (p->fd) close(p->fd);
  *p = (td_pictures){0};
}

// ---- memory -------------------------------------------------------------------------------------

static uint64_t room_of(const td_pictures *p, const td_wire_image *image) {
  const uint64_t patch = p->processor.patch;
  const uint64_t n = 3 * patch * patch * image->grid_h * image->grid_w;
  return (n + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static _Atomic uint64_t *bytes_of(const td_picture_list *list) {
  return &list->from->of_tenants[list->tenant % TD_COUNT(list->from->of_tenants)];
}

static bool reserve(const td_picture_list *list, uint64_t room) {
  td_pictures *p = list->from;
  if (atomic_fetch_add(&p->n_bytes, room) + room <= p->most) {
    if (atomic_fetch_add(bytes_of(list), room) + room <= p->most / 2) return true;
    atomic_fetch_sub(bytes_of(list), room);
  }
  atomic_fetch_sub(&p->n_bytes, room);
  return false;
}

static void give_back(const td_picture_list *list, const td_wire_image *image) {
  td_pictures *p = list->from;
  const uint64_t room = room_of(p, image);
  fallocate(p->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)image->offset, (off_t)room);
  atomic_fetch_sub(bytes_of(list), room);
  atomic_fetch_sub(&p->n_bytes, room);
}

static td_status write_pixels(int fd, uint64_t offset, const uint8_t *rgb, size_t n, td_err *err) {
  while (n) {
    const ssize_t done = pwrite(fd, rgb, n, (off_t)offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0)
      return td_fail(err, TD_ENOMEM, "out of memory for an image: %s", strerror(errno));
    rgb += done;
    offset += (uint64_t)done;
    n -= (size_t)done;
  }
  return TD_OK;
}

static td_status keep(td_picture_list *list, td_wire_image *image, const uint8_t *rgb,
                      td_err *err) {
  td_pictures *p = list->from;
  const uint64_t room = room_of(p, image), patch = p->processor.patch;
  if (list->n_bytes + room > p->most / 4) {
    return td_fail(err, TD_ELIMIT,
                   "the images of a request take more than %" PRIu64
                   " MB: send fewer or smaller ones",
                   p->most / 4 >> 20);
  }
  if (!reserve(list, room)) {
    return td_fail(err, TD_EAGAIN,
                   "the images of all requests take more than %" PRIu64
                   " MB, or yours more than half of that: try again later",
                   p->most >> 20);
  }
  image->offset = atomic_fetch_add(&p->end, room);
  list->n_bytes += room;
  const size_t n = 3 * patch * patch * image->grid_h * image->grid_w;
  td_status st = write_pixels(p->fd, image->offset, rgb, n, err);
  if (st != TD_OK) give_back(list, image);
  return st;
}

// ---- preparation --------------------------------------------------------------------------------

static bool is_over(void *ctx) {
  const atomic_bool *is_canceled = ctx;
  return atomic_load_explicit(is_canceled, memory_order_relaxed);
}

// The model's processor with a client's limits, inside of the model's largest.
static td_image_processor processor_of(const td_pictures *p, const td_api_image *image) {
  td_image_processor out = p->processor;
  const uint64_t frames = out.rule == TD_RESIZE_GLM ? out.temporal : 1;
  const uint64_t least = frames * (uint64_t)image->min_pixels;
  const uint64_t most = frames * (uint64_t)image->max_pixels;
  if (most && most < out.max_pixels) out.max_pixels = most;
  if (least) out.min_pixels = least;
  if (out.min_pixels > out.max_pixels) out.min_pixels = out.max_pixels;
  return out;
}

static td_status prepare(td_picture_list *list, const td_api_image *from,
                         const atomic_bool *is_canceled, td_err *err) {
  const td_image_processor processor = processor_of(list->from, from);
  const td_image_limits limits = {.max_pixels = TD_PICTURES_PIXELS,
                                  .max_bytes = TD_API_MAX_IMAGE_BYTES,
                                  .is_cancelled = is_over,
                                  .ctx = (void *)is_canceled};
  td_image image;
  td_image_input input;
  uint8_t *rgb = NULL;
  td_wire_image *out = &list->images[list->n];
  td_status st = td_image_decode(&image, (const uint8_t *)from->bytes.data, from->bytes.len,
                                 &limits, err);
  if (st == TD_OK) st = td_image_prepare(&input, &rgb, &image, &processor, err);
  if (st == TD_OK) {
    *out = (td_wire_image){.n_tokens = input.n_tokens,
                           .grid_h = input.grid_h,
                           .grid_w = input.grid_w,
                           .norm = input.norm};
    memcpy(out->hash, input.hash, sizeof out->hash);
    if (list->is_kept) st = keep(list, out, rgb, err);
  }
  if (st == TD_OK) list->n++;
  td_image_free(&image);
  free(rgb);
  return st;
}

static td_status fail(const td_api_image *image, td_status st, const td_err *why,
                      td_api_error *error) {
  td_err err = {0};
  if (st == TD_EAGAIN) return td_api_fail(error, 429, NULL, NULL, "%s", why->msg);
  if (st == TD_ENOMEM || st == TD_ECANCELED) {
    td_fail(&err, st, "%s", why->msg);
    return td_api_fail_err(error, NULL, &err);
  }
  return td_api_wrong(error, image->where, ": Could not process image: %s", why->msg);
}

td_status td_pictures_take(td_picture_list **out, td_pictures *from, td_api_request *request,
                           uint64_t tenant, bool is_kept, const atomic_bool *is_canceled,
                           td_api_error *error) {
  const uint32_t n = request->n_images;
  td_err err = {0};
  td_status st = TD_OK;
  *out = NULL;
  if (!n) return TD_OK;
  td_picture_list *list = calloc(1, sizeof *list);
  td_wire_image *images = calloc(n, sizeof *images);
  if (!list || !images) {
    free(list);
    free(images);
    return td_api_fail(error, 503, NULL, NULL, "out of memory");
  }
  *list = (td_picture_list){
      .from = from, .n_refs = 1, .images = images, .is_kept = is_kept, .tenant = tenant};
  for (uint32_t i = 0; i < n && st == TD_OK; i++) {
    st = prepare(list, &request->images[i], is_canceled, &err);
    if (st != TD_OK) st = fail(&request->images[i], st, &err, error);
    td_buf_free(&request->images[i].bytes);
  }
  if (st == TD_OK)
    *out = list;
  else
    td_pictures_drop(list);
  return st;
}

td_picture_list *td_pictures_hold(td_picture_list *list) {
  if (list) list->n_refs++;
  return list;
}

void td_pictures_drop(td_picture_list *list) {
  if (!list || --list->n_refs) return;
  for (uint32_t i = 0; i < list->n && list->is_kept; i++)
    give_back(list, &list->images[i]);
  free(list->images);
  free(list);
}

// ---- tokens -------------------------------------------------------------------------------------

// Whether the image's tokens are at ids[at].
static bool is_at(const td_picture_list *list, const td_token_ids *ids, uint32_t image, size_t at) {
  const uint32_t n = list->images[image].n_tokens;
  bool ok = n <= ids->n - at;
  for (uint32_t i = 0; i < n && ok; i++)
    ok = ids->ids[at + i] == list->from->token;
  return ok;
}

// Appends ids[n] with the images from `next` on; the first n_known tokens have theirs.
static td_status add_expanded(td_picture_list *list, uint32_t next, const td_token_ids *ids,
                              size_t n_known, td_token_ids *out, td_err *err) {
  td_status st = TD_OK;
  for (size_t at = 0; at < ids->n && st == TD_OK; at++) {
    if (ids->ids[at] != list->from->token) {
      st = td_token_ids_push(out, ids->ids[at], err);
      continue;
    }
    if (next == list->n || (at < n_known && !is_at(list, ids, next, at)))
      return td_fail(err, TD_EINVAL, "the chat template shows other images than the messages have");
    td_wire_image *image = &list->images[next++];
    image->at = (uint32_t)out->n;
    if (at < n_known) at += image->n_tokens - 1;
    for (uint32_t i = 0; i < image->n_tokens && st == TD_OK; i++)
      st = td_token_ids_push(out, list->from->token, err);
  }
  if (st == TD_OK && next != list->n)
    return td_fail(err, TD_EINVAL, "the chat template leaves out images of the messages");
  return st;
}

td_status td_pictures_expand(td_picture_list *list, td_token_ids *ids, size_t n_known, bool is_cut,
                             td_err *err) {
  td_token_ids out = {.most = ids->most, .is_canceled = ids->is_canceled};
  uint32_t n_places = 0;
  for (uint32_t i = 0; i < list->n && ids->n_cut; i++)
    ids->n_cut += list->images[i].n_tokens - 1;
  if (ids->n_cut) return TD_OK; // not all tokens are there, and they are too many anyway
  for (size_t i = 0; i < ids->n; i++)
    n_places += ids->ids[i] == list->from->token;
  list->first = is_cut && n_places < list->n ? list->n - n_places : 0;
  td_status st = add_expanded(list, list->first, ids, n_known, &out, err);
  if (st != TD_OK) {
    td_token_ids_free(&out);
    return st;
  }
  if (out.most && out.n > out.most) {
    out.n_cut = out.n - out.most;
    out.n = out.most;
  }
  td_token_ids_free(ids);
  *ids = out;
  return TD_OK;
}

// Every key of an image, and of the LEAD tokens in front of it, has 31 bits of a digest of its hash
// and these tokens: a page with image tokens has eight different ones, so that none is shared by
// chance or design. The sign tells them from token ids.
void td_pictures_key(const td_picture_list *list, int32_t *ids) {
  for (uint32_t i = list->first; i < list->n; i++) {
    const td_wire_image *image = &list->images[i];
    const uint32_t begin = image->at > LEAD ? image->at - LEAD : 0;
    const uint32_t end = image->at + image->n_tokens;
    int32_t words[sizeof(td_digest) / sizeof(int32_t)];
    td_digest digest;
    td_sha256 sha;
    td_sha256_begin(&sha);
    td_sha256_add(&sha, image->hash, sizeof image->hash);
    td_sha256_add(&sha, &image->n_tokens, sizeof image->n_tokens);
    td_sha256_add(&sha, ids + begin, (image->at - begin) * sizeof *ids);
    td_sha256_end(&sha, &digest);
    memcpy(words, &digest, sizeof words);
    for (uint32_t at = begin; at < end; at++)
      ids[at] = words[(at - begin) % TD_COUNT(words)] | INT32_MIN;
  }
}
