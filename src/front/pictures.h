// src/front/pictures.h - the images of requests: decoded, resized and, for workers, in memory that
// these map. An image lies there from its preparation until the last request with it has ended.
#pragma once

#include <stdatomic.h>

#include "api/request.h"
#include "base/token_ids.h"
#include "image/image.h"
#include "model/vision.h"
#include "tandem/wire.h"

// Of all requests' pixels together; half of it for a single tenant's, a quarter for one request's.
#define TD_PICTURES_BYTES  (1ull << 30)
#define TD_PICTURES_PIXELS (36u << 20) // of one image, as it was sent

typedef struct {
  td_image_processor processor;
  int32_t token;                   // that stands for an image in prompts
  int fd;                          // the memory; it is never 0
  _Atomic uint64_t end;            // offset of the next image: none is used twice
  uint64_t most;                   // bytes in use at a time
  _Atomic uint64_t n_bytes;        // in use
  _Atomic uint64_t of_tenants[64]; // thereof, by a tenant's number; some may share one
} td_pictures;

// TD_ENOENT: the model does not see, and *out is zeroed. A zeroed one may be closed.
td_status td_pictures_open(td_pictures *out, const char *model_dir, const td_vision_config *vision,
                           td_err *err);
void td_pictures_close(td_pictures *pictures);

// A request's images, in the order of its prompt.
typedef struct {
  td_pictures *from;
  uint32_t n_refs;       // on the loop's thread alone
  uint32_t first, n;     // those from first on are in the prompt
  td_wire_image *images; // owned, [n]
  bool is_kept;          // in the memory
  uint64_t tenant;
  uint64_t n_bytes; // there
} td_picture_list;

// Prepares the images of a tenant's request and frees the files. *out is NULL if it has none.
// is_kept: pixels are wanted, not sizes alone. Any thread. Error: a td_api_error, also
// TD_ECANCELED.
td_status td_pictures_take(td_picture_list **out, td_pictures *from, td_api_request *request,
                           uint64_t tenant, bool is_kept, const atomic_bool *is_canceled,
                           td_api_error *error);
td_picture_list *td_pictures_hold(td_picture_list *list); // NULL is legal, also below
void td_pictures_drop(td_picture_list *list);

// Puts as many tokens in the place of each image's as it has, and notes where they are; the first
// n_known tokens have them. is_cut: the first turns may have been left out, and their images with
// them. TD_EINVAL: the tokens do not have the images' places.
td_status td_pictures_expand(td_picture_list *list, td_token_ids *ids, size_t n_known, bool is_cut,
                             td_err *err);
// Turns a prompt's ids, the same for all images, into keys of the prefix cache, which differ.
void td_pictures_key(const td_picture_list *list, int32_t *ids);
