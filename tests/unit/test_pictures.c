// tests/unit/test_pictures.c - the tokens of images, and what the prefix cache knows them by.
#include <stdio.h>
#include <string.h>

#include "front/pictures.h"
#include "shm/segment.h"
#include "unit/testing.h"

enum { PAD = 99, MAX = 128 };

static td_pictures store = {.token = PAD};

static td_picture_list two(td_wire_image *images) {
  images[0] = (td_wire_image){.n_tokens = 4, .hash = {1}};
  images[1] = (td_wire_image){.n_tokens = 3, .hash = {2}};
  return (td_picture_list){.from = &store, .n_refs = 1, .n = 2, .images = images};
}

static void expand(td_picture_list *list, const int32_t *ids, size_t n, size_t n_known, bool is_cut,
                   const int32_t *wanted, size_t n_wanted) {
  td_token_ids out = {0};
  td_err err;
  assert_int_equal(td_token_ids_add(&out, ids, n, &err), TD_OK);
  const td_status st = td_pictures_expand(list, &out, n_known, is_cut, &err);
  assert_int_equal(st, wanted ? TD_OK : TD_EINVAL);
  if (wanted) {
    assert_int_equal(out.n, n_wanted);
    assert_memory_equal(out.ids, wanted, n_wanted * sizeof *wanted);
  }
  td_token_ids_free(&out);
}
#define EXPAND(list, ids, n_known, is_cut, wanted)                                                 \
  expand(list, ids, TD_COUNT(ids), n_known, is_cut, wanted, TD_COUNT(wanted))
#define REFUSE(list, ids, n_known) expand(list, ids, TD_COUNT(ids), n_known, false, NULL, 0)

TEST(images_get_their_tokens) {
  static const int32_t short_ids[] = {1, PAD, 2, 3, PAD, 4}, none[] = {1, 2}, one[] = {1, PAD},
                       three[] = {PAD, PAD, PAD}, known[] = {1, PAD, PAD, PAD, PAD, 2, 3, PAD, 4},
                       broken[] = {1, PAD, PAD, PAD, 2, 3, PAD, 4},
                       whole[] = {1, PAD, PAD, PAD, PAD, 2, 3, PAD, PAD, PAD, 4},
                       last[] = {1, PAD, PAD, PAD};
  td_wire_image images[2];
  td_picture_list list = two(images);
  EXPAND(&list, short_ids, 0, false, whole);
  assert_int_equal(images[0].at, 1);
  assert_int_equal(images[1].at, 7);
  EXPAND(&list, known, 6, false, whole); // the first is there
  EXPAND(&list, whole, TD_COUNT(whole), false, whole);
  REFUSE(&list, broken, 5);
  REFUSE(&list, none, 0);
  REFUSE(&list, one, 0);
  REFUSE(&list, three, 0);
  EXPAND(&list, one, 0, true, last); // the first was left out
  assert_int_equal(list.first, 1);
  assert_int_equal(images[1].at, 1);
}

TEST(what_is_too_long_is_counted) {
  td_wire_image images[2];
  td_picture_list list = two(images);
  td_err err;
  td_token_ids ids = {.most = 6};
  const int32_t some[] = {1, PAD, 2, 3, PAD, 4};
  assert_int_equal(td_token_ids_add(&ids, some, TD_COUNT(some), &err), TD_OK);
  assert_int_equal(td_pictures_expand(&list, &ids, 0, false, &err), TD_OK);
  assert_int_equal(ids.n, 6);
  assert_int_equal(ids.n_cut, 5);
  ids.n_cut = 100;
  assert_int_equal(td_pictures_expand(&list, &ids, 0, false, &err), TD_OK);
  assert_int_equal(ids.n_cut, 105);
  td_token_ids_free(&ids);
}

// How many keys two prompts have in common.
static int n_common(const int32_t *a, const int32_t *b) {
  int n = 0;
  while (n < MAX && a[n] == b[n])
    n++;
  return n;
}

static void keys_of(int32_t *out, uint32_t at, uint32_t n_tokens, uint8_t first, uint8_t second) {
  td_wire_image images[] = {{.at = at, .n_tokens = n_tokens, .hash = {first}},
                            {.at = at + n_tokens + 1, .n_tokens = n_tokens, .hash = {second}}};
  const td_picture_list list = {.from = &store, .n = 2, .images = images};
  for (int i = 0; i < MAX; i++)
    out[i] = i;
  for (uint32_t i = 0; i < n_tokens; i++)
    out[at + i] = out[at + n_tokens + 1 + i] = PAD;
  td_pictures_key(&list, out);
}

TEST(keys_differ_where_images_do) {
  int32_t a[MAX], b[MAX], c[MAX], d[MAX];
  for (uint32_t at = 0; at < 20; at++) {
    for (uint32_t n = 1; n < 40; n++) {
      keys_of(a, at, n, 1, 2);
      keys_of(b, at, n, 1, 2);
      keys_of(c, at, n, 3, 2);
      keys_of(d, at, n, 1, 3);
      assert_int_equal(n_common(a, b), MAX);
      const uint32_t begin = at > 7 ? at - 7 : 0, next = at + n + 1, last = next > 7 ? next - 7 : 0;
      assert_int_equal(n_common(a, c), begin);
      assert_int_equal(n_common(a, d), last);
      assert_int_equal(a[next + n], next + n); // behind, tokens are their own keys
      for (uint32_t i = begin; i < next + n; i++)
        assert_true(a[i] < 0 || a[i] == (int32_t)i);
      // No run of a page has few different keys where an image is.
      for (uint32_t i = last; n >= 8 && i + 8 <= next + n; i++)
        for (uint32_t k = 1; k < 8; k++)
          assert_true(a[i] != a[i + k]);
    }
  }
}

// What stands in front of an image is part of its keys, and its own place is not lost.
TEST(keys_keep_the_tokens_in_front) {
  int32_t a[] = {1, 2, 3, PAD, 5}, b[] = {1, 2, 4, PAD, 5};
  td_wire_image image = {.at = 3, .n_tokens = 1, .hash = {1}};
  const td_picture_list list = {.from = &store, .n = 1, .images = &image};
  td_pictures_key(&list, a);
  td_pictures_key(&list, b);
  for (int i = 0; i < 4; i++)
    assert_true(a[i] < 0 && a[i] != b[i]);
  assert_true(a[4] == 5 && b[4] == 5);
}

// Takes an image of 96 x 64 pixels, five pages; returns the HTTP status, 0 if it was taken.
static int take(td_picture_list **out, td_pictures *from, uint64_t tenant) {
  static const atomic_bool is_canceled;
  char bytes[4096];
  FILE *file = fopen(TD_TEST_DIR "/fuzz/corpus/fuzz_image/png_rgb", "rb");
  assert_true(file);
  const size_t n = fread(bytes, 1, sizeof bytes, file);
  fclose(file);
  td_api_image image = {.bytes = TD_BUF_INIT, .where = NULL};
  td_api_request request = {.images = &image, .n_images = 1};
  td_api_error error = {0};
  td_buf_add(&image.bytes, bytes, n);
  const td_status st = td_pictures_take(out, from, &request, tenant, true, &is_canceled, &error);
  const int status = st == TD_OK ? 0 : error.status;
  assert_true((st == TD_OK) == (*out != NULL));
  return status;
}

TEST(a_tenant_leaves_room_to_others) {
  enum { PAGES = 5 * 4096 };
  td_pictures p = {.processor = {.patch = 16, .merge = 2, .min_pixels = 4096, .max_pixels = 4096},
                   .most = 4 * PAGES};
  td_picture_list *lists[4], *none;
  td_err err;
  assert_int_equal(td_segment_reserve(&p.fd, "images", &err), TD_OK);
  assert_int_equal(take(&lists[0], &p, 1), 0);
  assert_int_equal(take(&lists[1], &p, 1), 0);
  assert_int_equal(take(&none, &p, 1), 429); // half is its own
  assert_int_equal(take(&lists[2], &p, 2), 0);
  assert_int_equal(take(&lists[3], &p, 3), 0);
  assert_int_equal(take(&none, &p, 4), 429); // all is in use
  td_pictures_drop(lists[0]);
  assert_int_equal(take(&lists[0], &p, 4), 0);
  td_pictures_drop(lists[1]);
  assert_int_equal(take(&lists[1], &p, 1), 0);
  for (int i = 0; i < 4; i++)
    td_pictures_drop(lists[i]);
  assert_int_equal(p.n_bytes, 0);
  assert_int_equal(p.of_tenants[1] + p.of_tenants[2] + p.of_tenants[3] + p.of_tenants[4], 0);
  td_pictures_close(&p);
}
