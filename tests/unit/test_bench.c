// The pure parts of the benches: formats, their matrices, medians; and the HTTP client's addresses.
// CTest: no-tsan
#include <arpa/inet.h>
#include <math.h>
#include <netdb.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/stats.h"
#include "bench/known_answers.h"
#include "bench/openai_client.h"
#include "bench/report.h"
#include "tandem/kernels.h"
#include "unit/testing.h"

static const td_format *format_named(const char *name) {
  const td_format *format = td_format_named(name);
  if (!format) fail_msg("no format %s", name);
  return format;
}

TEST(every_linear_family_has_a_format) {
  size_t n_variants, n;
  const td_kernel_variant *variants = td_kernel_variants(&n_variants);
  const td_format *formats = td_formats(&n);
  for (size_t v = 0; v < n_variants; v++) {
    // linear_split is of images' towers, not of a format.
    if (strncmp(variants[v].family, "linear_", 7) || !strcmp(variants[v].family, "linear_split"))
      continue;
    size_t i = 0;
    while (i < TD_N_ACTIVATIONS * n &&
           strcmp(td_bench_family(&formats[i / TD_N_ACTIVATIONS],
                                  (td_activations)(i % TD_N_ACTIVATIONS), true),
                  variants[v].family))
      i++;
    if (i == TD_N_ACTIVATIONS * n) fail_msg("%s is not measured", variants[v].family);
  }
}

// kernels/README.md has a row for every format.
TEST(formats_are_documented) {
  td_buf page = TD_BUF_INIT, row = TD_BUF_INIT;
  td_err err;
  assert_int_equal(td_file_read(&page, TD_TEST_DIR "/../kernels/README.md", 1 << 20, &err), TD_OK);
  size_t n;
  const td_format *formats = td_formats(&n);
  for (size_t i = 0; i < n; i++) {
    td_buf_clear(&row);
    td_buf_printf(&row, "\n| `%s` | %s | `%s` |\n", formats[i].name, formats[i].what,
                  td_weight_kind_of(formats[i].dtype)->family);
    if (!strstr(td_buf_text(&page), td_buf_text(&row)))
      fail_msg("kernels/README.md lacks %s", td_buf_text(&row));
  }
  td_buf_free(&page);
  td_buf_free(&row);
}

// As the engine has it: 8 bits are for prompts.
TEST(answers_are_not_in_8_bits) {
  const td_format *int4 = format_named("int4-g128");
  assert_string_equal(td_bench_family(int4, TD_ACTIVATIONS_INT8, true), "linear_w4a8");
  assert_string_equal(td_bench_family(int4, TD_ACTIVATIONS_INT8, false), "linear_i4");
  assert_string_equal(td_bench_family(int4, TD_ACTIVATIONS_AUTO, true), "linear_i4");
}

TEST(choosing_formats) {
  const td_format *bf16 = format_named("bf16");
  assert_true(td_bench_format_chosen(bf16, NULL));
  assert_true(td_bench_format_chosen(bf16, "fp8-b128,bf16"));
  assert_true(td_bench_format_chosen(bf16, "bf16"));
  assert_false(td_bench_format_chosen(bf16, "fp8-b128"));
  assert_false(td_bench_format_chosen(format_named("f16"), "bf16"));
}

// A matrix takes what its parts take, rounded up, and its parts do not overlap.
TEST(matrix_layout) {
  td_weight w;
  size_t fp8 = td_bench_weight(&w, format_named("fp8-b128"), 256, 384, NULL);
  assert_int_equal(fp8, 256 * 384 + 64); // 2 x 3 scales of 4 bytes
  assert_int_equal(td_bench_weight(&w, format_named("bf16"), 256, 384, NULL), 256 * 384 * 2);
  char *memory = aligned_alloc(64, 1 << 20);
  size_t int4 = td_bench_weight(&w, format_named("int4-g128-zp"), 256, 384, memory);
  assert_int_equal(int4, 256 * 384 / 2 + 256 * 3 * 2 + 256 * 3 / 2);
  assert_ptr_equal(w.data, memory);
  assert_ptr_equal(w.scale, memory + 256 * 384 / 2);
  assert_ptr_equal(w.zero, memory + 256 * 384 / 2 + 256 * 3 * 2);
  td_bench_weight(&w, format_named("int8-channel"), 256, 384, memory);
  assert_int_equal(td_weight_groups(&w), 1);
  free(memory);
}

// Every format's made-up matrix gives every kernel of its family finite, nonzero results.
TEST(filled_matrices_are_ordinary) {
  enum { ROWS = 64, COLS = 256 };
  float x[COLS], y[ROWS];
  for (int i = 0; i < COLS; i++)
    x[i] = 1;
  size_t n, n_variants;
  const td_format *formats = td_formats(&n);
  const td_kernel_variant *variants = td_kernel_variants(&n_variants);
  for (size_t f = 0; f < n; f++) {
    td_weight w;
    void *memory = aligned_alloc(64, td_bench_weight(&w, &formats[f], ROWS, COLS, NULL));
    td_bench_weight(&w, &formats[f], ROWS, COLS, memory);
    td_bench_fill(&w, memory, 7);
    const char *family = td_weight_kind_of(w.dtype)->family;
    for (size_t v = 0; v < n_variants; v++) {
      if (strcmp(variants[v].family, family)) continue;
      if (!td_kernel_variant_runs(&variants[v])) continue;
      ((td_linear_fn)variants[v].fn)(&(td_linear_args){
          .w = &w, .x = x, .y = y, .ldx = COLS, .ldy = ROWS, .n_tokens = 1, .row_end = ROWS});
      double sum = 0;
      for (int r = 0; r < ROWS; r++)
        sum += y[r] < 0 ? -(double)y[r] : (double)y[r];
      if (!(sum > 1e-3 && sum < 1e6)) fail_msg("%s: sum %g", formats[f].name, sum);
    }
    free(memory);
  }
}

TEST(median) {
  double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2}, one[] = {5};
  assert_true(td_median(odd, 3) == 2);
  assert_true(td_median(even, 4) == 2.5);
  assert_true(td_median(one, 1) == 5);
  const double sorted[] = {1, 2, 3, 4};
  assert_true(td_percentile(sorted, 4, 50) == 2 && td_percentile(sorted, 4, 51) == 3);
  assert_true(td_percentile(sorted, 4, 0) == 1 && td_percentile(sorted, 4, 100) == 4);
  assert_true(isnan(td_percentile(NULL, 0, 50)));
}

TEST(share_refers_to_dot_products_where_there_are_some) {
  td_bench_speed both = {.peaks = {.fma_gflops = 60, .dot_gflops = 85}};
  td_bench_speed fma = {.peaks = {.fma_gflops = 60}};
  assert_true(td_bench_peak(&both) == 85 && td_bench_peak(&fma) == 60);
}

TEST(too_many_matrices) {
  td_err err;
  assert_int_equal(td_bench_need_memory(1e18, "bf16", &err), TD_ENOMEM);
  assert_non_null(strstr(err.msg, "--n-weights"));
  assert_int_equal(td_bench_need_memory(1, "bf16", &err), TD_OK);
}

// What the name of every host resolves to, instead of what the C library says.
static struct sockaddr_in found_addresses[2];
static struct addrinfo found[2];

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                struct addrinfo **out) {
  (void)host, (void)service, (void)hints;
  *out = found;
  return 0;
}

void freeaddrinfo(struct addrinfo *list) {
  (void)list;
}

static int listen_at(struct sockaddr_in *address) {
  socklen_t len = sizeof *address;
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  assert_int_equal(bind(fd, (struct sockaddr *)address, len), 0);
  assert_int_equal(listen(fd, 1), 0);
  assert_int_equal(getsockname(fd, (struct sockaddr *)address, &len), 0);
  return fd;
}

static void *answer(void *arg) {
  static const char response[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
  char request[1024];
  const int fd = accept(*(const int *)arg, NULL, NULL);
  if (fd < 0 || read(fd, request, sizeof request) <= 0) return NULL;
  (void)!write(fd, response, sizeof response - 1);
  close(fd);
  return NULL;
}

// As of a name whose IPv6 address refuses.
TEST(every_address_is_tried) {
  pthread_t thread;
  td_err err;
  td_buf out = TD_BUF_INIT;
  const td_fetch_args args = {.server = "http://host:1", .path = "/health"};
  for (int i = 0; i < 2; i++) {
    found[i] = (struct addrinfo){.ai_addr = (struct sockaddr *)&found_addresses[i],
                                 .ai_addrlen = sizeof found_addresses[i],
                                 .ai_next = i ? NULL : &found[1]};
  }
  close(listen_at(&found_addresses[0])); // nobody listens there any more
  int fd = listen_at(&found_addresses[1]);
  assert_int_equal(pthread_create(&thread, NULL, answer, &fd), 0);
  const td_status st = td_fetch(&out, &args, &err);
  if (st != TD_OK) fail_msg("%s", err.msg); // without waiting for the thread
  pthread_join(thread, NULL);
  assert_string_equal(td_buf_text(&out), "ok");
  close(fd);
  assert_int_equal(td_fetch(&out, &args, &err), TD_EIO); // neither
  assert_non_null(strstr(err.msg, "connection refused"));
  td_buf_free(&out);
}

// ---- known answers ------------------------------------------------------------------------------

// What is wrong with the device: bits of a word of the results, or of a byte of the weights that
// has no low bits of a float.
static uint32_t wrong_result;
static uint8_t wrong_weight;

void __real_td_op_linear(td_stream *stream, const td_linear_op_args *args);
void __wrap_td_op_linear(td_stream *stream, const td_linear_op_args *args);
void __wrap_td_op_linear(td_stream *stream, const td_linear_op_args *args) {
  td_err err;
  uint8_t *byte = (uint8_t *)(uintptr_t)args->w->data + td_weight_row_bytes(args->w) * 3 / 2 - 1;
  *byte ^= wrong_weight;
  __real_td_op_linear(stream, args);
  assert_int_equal(td_stream_sync(stream, &err), TD_OK);
  *byte ^= wrong_weight;
  uint32_t *result = (uint32_t *)args->y + args->y_stride - 1;
  *result ^= wrong_result;
}

// Of how many comparisons, which all of a device's matrices take part in.
static uint32_t n_wrong_of(uint32_t *n) {
  td_dev *dev;
  td_err err;
  td_buf text = TD_BUF_INIT;
  uint32_t n_wrong = 0;
  const td_dev_opts opts = {.kind = "cpu", .n_threads = 2, .activations = TD_ACTIVATIONS_AUTO};
  assert_int_equal(td_dev_open(&dev, &opts, &err), TD_OK);
  assert_int_equal(td_known_answers(&text, dev, n, &n_wrong, &err), TD_OK);
  assert_int_equal(n_wrong > 0, text.len > 0);
  td_buf_free(&text);
  td_dev_close(dev);
  return n_wrong;
}

TEST(a_device_that_is_right_is_not_called_wrong) {
  uint32_t n;
  assert_int_equal(n_wrong_of(&n), 0);
}

TEST(a_bit_of_a_result_is_seen_in_every_format) {
  uint32_t n;
  wrong_result = 1u << 30;
  assert_true(n_wrong_of(&n) >= n - 3); // all but operations on rows, which are not of matrices
  wrong_result = 0;
}

TEST(a_byte_of_the_weights_is_seen_in_every_format) {
  uint32_t n;
  wrong_weight = 0xff;
  assert_true(n_wrong_of(&n) >= n - 3);
  wrong_weight = 0;
}
