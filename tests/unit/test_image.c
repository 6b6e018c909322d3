// tests/unit/test_image.c - images decoded and resized to the bits of Pillow and torch, limits, and
// what files say of processors.
#include "image/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/fs.h"
#include "base/sha256.h"
#include "unit/testing.h"

static const struct {
  const char *name;
  uint32_t width, height;
  const char *digest;
} files[] = {
#define IMAGE_FILE(name, width, height, digest) {name, width, height, digest},
#define IMAGE_RESIZED(...)
#include "unit/image_golden.inc"
#undef IMAGE_FILE
#undef IMAGE_RESIZED
};

static const struct {
  uint32_t width, height, processor, grid_h, grid_w;
  const char *digest;
} resized[] = {
#define IMAGE_FILE(...)
#define IMAGE_RESIZED(width, height, processor, grid_h, grid_w, digest)                            \
  {width, height, processor, grid_h, grid_w, digest},
#include "unit/image_golden.inc"
};

static const td_image_limits no_limits = {.max_pixels = 1 << 20, .max_bytes = 1 << 20};

static void check_digest(const uint8_t *rgb, size_t n_bytes, const char *expected) {
  char hex[TD_DIGEST_HEX];
  td_digest digest;
  td_sha256 sha;
  td_sha256_begin(&sha);
  td_sha256_add(&sha, rgb, n_bytes);
  td_sha256_end(&sha, &digest);
  td_digest_hex(hex, &digest);
  hex[16] = '\0';
  assert_string_equal(hex, expected);
}

static td_buf read_file(const char *name) {
  char path[512];
  td_buf bytes = TD_BUF_INIT;
  snprintf(path, sizeof path, TD_TEST_DIR "/fuzz/corpus/fuzz_image/%s", name);
  assert_int_equal(td_file_read(&bytes, path, 1 << 20, NULL), TD_OK);
  return bytes;
}

static td_status decode(td_image *out, const td_buf *bytes, size_t n, const td_image_limits *limits,
                        td_err *err) {
  uint8_t *exact = malloc(n ? n : 1); // so that ASan sees what is read behind it
  if (n) memcpy(exact, bytes->data, n);
  const td_status st = td_image_decode(out, exact, n, limits, err);
  free(exact);
  return st;
}

TEST(decoding) {
  for (size_t i = 0; i < TD_COUNT(files); i++) {
    td_buf bytes = read_file(files[i].name);
    td_image image;
    td_err err;
    if (decode(&image, &bytes, bytes.len, &no_limits, &err) != TD_OK)
      fail_msg("%s: %s", files[i].name, err.msg);
    assert_int_equal(image.width, files[i].width);
    assert_int_equal(image.height, files[i].height);
    check_digest(image.rgb, (size_t)image.width * image.height * 3, files[i].digest);
    td_image_free(&image);
    td_buf_free(&bytes);
  }
}

TEST(files_cut_off_anywhere_are_refused) {
  for (size_t i = 0; i < TD_COUNT(files); i++) {
    td_buf bytes = read_file(files[i].name);
    for (size_t n = 0; n < bytes.len; n++) {
      td_image image;
      const td_status st = decode(&image, &bytes, n, &no_limits, NULL);
      if (st != TD_EFORMAT && !(st == TD_EUNSUPPORTED && n < 12))
        fail_msg("%s, %zu bytes of %zu: %d", files[i].name, n, bytes.len, (int)st);
      assert_null(image.rgb);
    }
    td_buf_free(&bytes);
  }
}

static long peak_kib(void) {
  struct rusage usage;
  assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
  return usage.ru_maxrss;
}

// By the header alone: libpng keeps a row, and 41 bytes may say that it has a GiB.
TEST(size_is_refused_before_memory_is_taken) {
  static char wide[] =
      "\x89PNG\r\n\x1a\n\0\0\0\rIHDR\x10\0\0\0\x10\0\0\0\x08\x06\0\0\0\x23\x4c\x98\xb9"
      "\0\0\0\1IDAT";
  const td_buf file = {.data = wide, .len = sizeof wide - 1};
  td_image image;
  const long before = peak_kib();
  assert_int_equal(decode(&image, &file, file.len, &no_limits, NULL), TD_ELIMIT);
  assert_true(peak_kib() - before < 100 << 10);
}

static bool counts_down(void *ctx) {
  int *left = ctx;
  return (*left)-- == 0;
}

TEST(limits_and_cancellation) {
  for (size_t i = 0; i < TD_COUNT(files); i++) {
    const uint64_t n_pixels = (uint64_t)files[i].width * files[i].height;
    td_buf bytes = read_file(files[i].name);
    td_image image;
    td_image_limits limits = {.max_pixels = n_pixels - 1, .max_bytes = bytes.len};
    assert_int_equal(decode(&image, &bytes, bytes.len, &limits, NULL), TD_ELIMIT);
    limits = (td_image_limits){.max_pixels = n_pixels, .max_bytes = bytes.len - 1};
    assert_int_equal(decode(&image, &bytes, bytes.len, &limits, NULL), TD_ELIMIT);
    for (int n = 0; n < 2; n++) { // before the first row, and later
      int left = n;
      limits = (td_image_limits){n_pixels, bytes.len, counts_down, &left};
      assert_int_equal(decode(&image, &bytes, bytes.len, &limits, NULL), TD_ECANCELED);
      assert_null(image.rgb);
    }
    td_buf_free(&bytes);
  }
  const td_buf text = {.data = (char[]){"GIF89a: not taken"}, .len = 17};
  td_image image;
  assert_int_equal(decode(&image, &text, text.len, &no_limits, NULL), TD_EUNSUPPORTED);
}

// The same bytes as noise() of scripts/make_image_golden.py.
static td_image noise(uint32_t width, uint32_t height) {
  const size_t n = (size_t)width * height * 3;
  td_image image = {width, height, malloc(n)};
  for (size_t i = 0; i < n; i++) {
    const uint32_t state = (uint32_t)((i + 1) * 2654435761u);
    image.rgb[i] = (uint8_t)((state ^ state >> 15) >> 8);
  }
  return image;
}

static const td_image_processor processors[] = {
    {.patch = 16, .merge = 2, .temporal = 2, .min_pixels = 65536, .max_pixels = 16777216},
    {.patch = 14, .merge = 2, .temporal = 2, .min_pixels = 3136, .max_pixels = 100000},
    {.patch = 14,
     .merge = 2,
     .temporal = 2,
     .min_pixels = 12544,
     .max_pixels = 100000,
     .rule = TD_RESIZE_GLM},
    {.patch = 14,
     .merge = 2,
     .temporal = 2,
     .min_pixels = 16 * 784,
     .max_pixels = 100 * 784,
     .rule = TD_RESIZE_PAD},
};

TEST(resizing) {
  for (size_t i = 0; i < TD_COUNT(resized); i++) {
    const td_image_processor *p = &processors[resized[i].processor];
    td_image image = noise(resized[i].width, resized[i].height);
    td_image_input input;
    uint8_t *rgb;
    assert_int_equal(td_image_prepare(&input, &rgb, &image, p, NULL), TD_OK);
    assert_int_equal(input.grid_h, resized[i].grid_h);
    assert_int_equal(input.grid_w, resized[i].grid_w);
    assert_int_equal(input.n_tokens, resized[i].grid_h * resized[i].grid_w / 4);
    assert_ptr_equal(input.rgb, rgb);
    check_digest(rgb, (size_t)input.grid_h * input.grid_w * p->patch * p->patch * 3,
                 resized[i].digest);
    td_image_free(&image);
    free(rgb);
  }
  uint32_t h, w;
  assert_int_equal(td_image_grid(&h, &w, 1, 201, &processors[0], NULL), TD_EINVAL);
}

// A hash stands for pixels, their grid and how they are normalized.
TEST(hashes) {
  td_image images[] = {noise(64, 256), noise(256, 64), noise(64, 256), noise(64, 256)};
  td_image_processor p = processors[1];
  td_image_input inputs[4];
  images[2].rgb[5] ^= 64;
  for (size_t i = 0; i < 4; i++) {
    uint8_t *rgb;
    if (i == 3) p.norm.mean[2] = 0.25f;
    assert_int_equal(td_image_prepare(&inputs[i], &rgb, &images[i], &p, NULL), TD_OK);
    for (size_t j = 0; j < i; j++)
      assert_memory_not_equal(inputs[i].hash, inputs[j].hash, sizeof inputs[i].hash);
    if (i < 3) td_image_free(&images[i]);
    free(rgb);
  }
  td_image_input again;
  uint8_t *rgb;
  assert_int_equal(td_image_prepare(&again, &rgb, &images[3], &p, NULL), TD_OK);
  assert_memory_equal(again.hash, inputs[3].hash, sizeof again.hash);
  td_image_free(&images[3]);
  free(rgb);
}

// A folder with one file.
static const char *const *kept; // name and text

static const void *find_kept(void *ctx, const char *path, size_t *n_bytes) {
  (void)ctx;
  if (!kept[1] || strcmp(strrchr(path, '/') + 1, kept[0])) return NULL;
  *n_bytes = strlen(kept[1]);
  return kept[1];
}

static td_status read_text(td_image_processor *p, const char *name, const char *text, td_err *err) {
  const td_file_kept find = {.find = find_kept};
  kept = (const char *const[]){name, text};
  td_file_keep(&find);
  const td_status st = td_image_processor_read(p, "/nowhere", err);
  td_file_keep(NULL);
  return st;
}

TEST(processors_of_files) {
  const char *name = "preprocessor_config.json";
  td_image_processor p;
  td_err err;
  assert_int_equal(read_text(&p, name, NULL, &err), TD_ENOENT);
  assert_int_equal(read_text(&p, name, "{\"image_processor_type\":\"CLIPImageProcessor\"}", &err),
                   TD_EUNSUPPORTED);
  assert_non_null(strstr(err.msg, "CLIPImageProcessor"));
  const char *qwen = "{\"image_processor_type\":\"Qwen2VLImageProcessorFast\",\"patch_size\":16,"
                     "\"size\":{\"shortest_edge\":65536,\"longest_edge\":16777216},"
                     "\"image_mean\":[0.5,0.25,0.5],\"image_std\":[0.5,0.5,0.125]}";
  assert_int_equal(read_text(&p, name, qwen, &err), TD_OK);
  assert_int_equal(p.patch, 16);
  assert_int_equal(p.merge, 2);
  assert_int_equal(p.min_pixels, 65536);
  assert_int_equal(p.max_pixels, 16777216);
  assert_int_equal(p.rule, TD_RESIZE_QWEN);
  assert_true(p.norm.mean[1] == 0.25f && p.norm.std[2] == 0.125f);
  const char *glm = "{\"image_processor\":{\"image_processor_type\":\"Glm4vImageProcessor\","
                    "\"min_pixels\":1000}}";
  assert_int_equal(read_text(&p, "processor_config.json", glm, &err), TD_OK);
  assert_int_equal(p.rule, TD_RESIZE_GLM);
  assert_int_equal(p.min_pixels, 1000);
  assert_int_equal(p.max_pixels, 28 * 28 * 15000);
  assert_int_equal(p.patch, 14);
  const char *glm5 = "{\"image_processor_type\":\"Glm5NextImageProcessor\",\"patch_size\":16,"
                     "\"size\":{\"longest_edge\":1},\"max_image_tokens\":1000}";
  assert_int_equal(read_text(&p, name, glm5, &err), TD_OK);
  assert_int_equal(p.rule, TD_RESIZE_PAD);
  assert_int_equal(p.min_pixels, 16 * 1024);
  assert_int_equal(p.max_pixels, 1000 * 1024);
  static const char *const wrong[] = {"\"patch_size\":0", "\"image_std\":[1,1,0]",
                                      "\"image_mean\":[1,1]", "\"min_pixels\":99999999"};
  for (size_t i = 0; i < TD_COUNT(wrong); i++) {
    char text[128];
    snprintf(text, sizeof text, "{\"image_processor_type\":\"Qwen2VLImageProcessor\",%s}",
             wrong[i]);
    assert_true(read_text(&p, name, text, &err) < 0);
    assert_non_null(strstr(err.msg, name));
  }
}
