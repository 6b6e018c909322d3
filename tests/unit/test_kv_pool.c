// tests/unit/test_kv_pool.c - the pool of KV pages that processes share: how large it is planned,
// who decides, and what others see of a page.
// CTest: no-tsan
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kv/pool.h"
#include "unit/testing.h"

TEST(kv_plan) {
  enum { KIB = 1024, MIB = 1024 * KIB };
  static const struct {
    td_kv_need need; // max_position, bytes/token, weights, available, ctx, kv, batch, is_device,
                     // layers, host, none of states
    td_status status;
    td_kv_plan plan;
  } cases[] = {
      // plenty: max_batch whole contexts
      {{4096, 16, MIB, 1024u * MIB, 0, 0, 4, false, 1, 0, 0, 0, 0}, TD_OK, {4096, 256}},
      {{1u << 20, 16, MIB, 1024u * MIB, 0, 0, 2, false, 1, 0, 0, 0, 0}, TD_OK, {32768, 1024}},
      {{4096, 16, MIB, 1024u * MIB, 100, 0, 3, false, 1, 0, 0, 0, 0},
       TD_OK,
       {100, 6}}, // whole pages each
      // half of what the weights leave: 8 of 24 MiB at 1 KiB a token
      {{32768, KIB, 8 * MIB, 24 * MIB, 4096, 0, 16, false, 1, 0, 0, 0, 0}, TD_OK, {4096, 128}},
      // weights larger than memory: a quarter of it
      {{32768, KIB, 900 * MIB, 32 * MIB, 4096, 0, 16, false, 1, 0, 0, 0, 0}, TD_OK, {4096, 128}},
      // a device: three quarters of what the weights leave, but for 1.5 GiB, and nothing where they
      // do
      // not fit
      {{4096, MIB, 8 * MIB, 8200ull * MIB, 4096, 0, 16, true, 1, 0, 0, 0, 0}, TD_OK, {4096, 96}},
      {{4096, KIB, 8 * MIB, 1556ull * MIB, 4096, 0, 16, true, 1, 0, 0, 0, 0}, TD_OK, {4096, 192}},
      {{4096, KIB, 8 * MIB, 1544ull * MIB, 4096, 0, 16, true, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      {{4096, KIB, 900 * MIB, 32 * MIB, 4096, 0, 16, true, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      // with a copy in host memory, which takes half of that at most
      {{4096, MIB, 8 * MIB, 8200ull * MIB, 4096, 0, 16, true, 1, 64ull << 30, 0, 0, 0},
       TD_OK,
       {4096, 96}},
      {{4096, MIB, 8 * MIB, 8200ull * MIB, 4096, 0, 16, true, 1, 10ull << 30, 0, 0, 0},
       TD_OK,
       {4096, 80}},
      {{4096, MIB, 0, 8200ull * MIB, 0, 2048, 16, true, 1, 1ull << 30, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      // the context is shortened when it was ours to choose, and only then
      {{32768, KIB, 0, 16 * MIB, 0, 0, 4, false, 1, 0, 0, 0, 0}, TD_OK, {8192, 128}},
      {{32768, KIB, 0, 16 * MIB, 16384, 0, 4, false, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      {{32768, MIB, 0, 16 * MIB, 0, 0, 4, false, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      // a pool of the user's own size
      {{32768, KIB, 0, 8 * MIB, 4096, 8192, 4, false, 1, 0, 0, 0, 0}, TD_OK, {4096, 128}},
      {{32768, KIB, 0, MIB, 0, 1000, 4, false, 1, 0, 0, 0, 0}, TD_OK, {1000, 16}},
      {{32768, KIB, 0, MIB, 4096, 4095, 4, false, 1, 0, 0, 0, 0}, TD_EINVAL, {0, 0}},
      {{32768, KIB, 0, 8 * MIB - 1, 4096, 8192, 4, false, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      {{32768, KIB, 0, MIB, 4096, 1u << 30, 4, false, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      {{4096, KIB, 0, 1024u * MIB, 4097, 0, 1, false, 1, 0, 0, 0, 0}, TD_EINVAL, {0, 0}},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_kv_plan plan = {0, 0};
    td_err err = {0};
    assert_int_equal(td_kv_plan_make(&plan, &cases[i].need, &err), cases[i].status);
    assert_int_equal(plan.n_ctx, cases[i].plan.n_ctx);
    assert_int_equal(plan.n_pages, cases[i].plan.n_pages);
    assert_int_equal(cases[i].status == TD_OK, err.msg[0] == '\0');
  }
}

static const td_kv_need small_need = {.max_position = 1000,
                                      .kv_bytes_per_token = 48,
                                      .available_bytes = 1u << 30,
                                      .max_batch = 4,
                                      .n_layers = 2};

// A page's parts, one a layer, as others see them.
static void check_copies(const td_kv_pool *pool, int fd) {
  enum { PART = 24 * TD_KV_PAGE_TOKENS };
  td_kv_shape shape;
  td_err err;
  static char page[2 * PART], again[2 * PART];
  assert_int_equal(td_kv_pool_shape(&shape, fd, &err), TD_OK);
  assert_int_equal(shape.n_layers, 2);
  assert_int_equal(shape.part_bytes, PART);
  memset(page, 1, PART);
  memset(page + PART, 2, PART);
  assert_int_equal(pool->versions[5], 0);
  assert_int_equal(td_kv_pool_put(fd, &shape, 5, page, &err), TD_OK);
  assert_true(pool->versions[5] == 1 && pool->versions[4] == 0 && pool->versions[6] == 0);
  assert_int_equal(td_kv_pool_get(fd, &shape, 5, again, &err), TD_OK);
  assert_memory_equal(page, again, sizeof page);
  const char *bytes = pool->pages;
  assert_memory_equal(bytes + 5 * PART, page, PART);
  assert_memory_equal(bytes + (64 + 5) * PART, page + PART, PART);
  assert_int_equal(bytes[5 * PART - 1] + bytes[6 * PART] + bytes[(64 + 6) * PART], 3 * 7);
  assert_int_equal(td_kv_pool_get(fd, &shape, 128, again, &err), TD_EIO);
}

// The first decides, whatever the others would; what is in the pool outlives who wrote it.
TEST(kv_pool) {
  td_err err;
  int fd, status;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  pid_t child = fork();
  if (child == 0) {
    td_kv_pool pool;
    if (td_kv_pool_attach(&pool, fd, &small_need, &err) != TD_OK) _exit(1);
    memset(pool.pages, 7, (size_t)pool.plan.n_pages * TD_KV_PAGE_TOKENS * 48);
    _exit(pool.plan.n_ctx == 1000 && pool.plan.n_pages == 64 ? 0 : 2);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  td_kv_need poorer = small_need, other = small_need;
  poorer.available_bytes = 1 << 20;
  other.kv_bytes_per_token = 50;
  td_kv_pool pool;
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &poorer, &err), TD_OK);
  assert_int_equal(pool.plan.n_ctx, 1000);
  assert_int_equal(pool.plan.n_pages, 64);
  const char *bytes = pool.pages;
  assert_int_equal(bytes[0], 7);
  assert_int_equal(bytes[64 * TD_KV_PAGE_TOKENS * 48 - 1], 7);
  check_copies(&pool, fd);
  td_kv_pool_close(&pool);
  assert_int_equal(td_kv_pool_attach(&pool, fd, &other, &err), TD_EFORMAT);
  assert_int_equal(close(fd), 0); // still ours after an error
}

// A page's parts and, behind those of all pages, its recurrent states.
TEST(kv_pool_with_states) {
  enum { PAGE = 256, PART = 24 * PAGE, STATE = 1000, STATES = 3, N = 2 * PART + STATES * STATE };
  td_kv_need need = small_need, other;
  need.page_tokens = PAGE;
  need.n_states = STATES;
  need.state_bytes = STATE;
  td_err err;
  int fd;
  static char page[N], again[N];
  td_kv_pool pool;
  td_kv_shape shape;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_int_equal(pool.plan.n_pages, 4 * 4); // four contexts of 1000 tokens
  assert_int_equal(td_kv_pool_shape(&shape, fd, &err), TD_OK);
  assert_int_equal(td_kv_shape_page_bytes(&shape), N);
  assert_int_equal(shape.page_tokens, PAGE);
  for (int i = 0; i < N; i++)
    page[i] = (char)(i % 251);
  assert_int_equal(td_kv_pool_put(fd, &shape, 5, page, &err), TD_OK);
  assert_int_equal(td_kv_pool_get(fd, &shape, 5, again, &err), TD_OK);
  assert_memory_equal(page, again, N);
  const char *bytes = pool.pages, *states = bytes + 16 * 2 * PART;
  assert_memory_equal(bytes + (16 + 5) * PART, page + PART, PART);
  for (int s = 0; s < STATES; s++)
    assert_memory_equal(states + (16 * s + 5) * STATE, page + 2 * PART + s * STATE, STATE);
  td_kv_pool_close(&pool);
  other = need;
  other.state_bytes = STATE + 4;
  assert_int_equal(td_kv_pool_attach(&pool, fd, &other, &err), TD_EFORMAT);
  assert_int_equal(close(fd), 0);
}

// Pages in a device's memory: the pool keeps the decision alone.
TEST(kv_pool_of_a_device) {
  td_err err;
  int fd;
  td_kv_need need = small_need;
  need.is_device = true;
  need.available_bytes = 4ull << 30;
  td_kv_pool pool;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_null(pool.pages);
  assert_int_equal(pool.plan.n_pages, 64);
  assert_true(pool.segment.n_bytes <= 4096);
  td_kv_pool_close(&pool);
  need.available_bytes = 1 << 20;
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_int_equal(pool.plan.n_pages, 64);
  td_kv_pool_close(&pool);
  assert_int_equal(td_kv_pool_attach(&pool, fd, &small_need, &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, "device"));
  assert_int_equal(close(fd), 0);
}

// Pages in a device's memory and in the pool.
TEST(kv_pool_with_copies) {
  td_err err;
  int fd;
  td_kv_need need = small_need;
  need.is_device = true;
  need.available_bytes = 4ull << 30;
  need.host_bytes = 1 << 30;
  td_kv_pool pool;
  td_kv_shape shape;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_non_null(pool.pages);
  assert_int_equal(td_kv_pool_shape(&shape, fd, &err), TD_OK);
  pool.versions[63] = 9; // it is the segment's last
  td_kv_pool_close(&pool);
  need.host_bytes = 1; // it is sized
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_int_equal(pool.plan.n_pages, 64);
  assert_int_equal(pool.versions[63], 9);
  td_kv_pool_close(&pool);
  need.host_bytes = 0;
  assert_int_equal(td_kv_pool_attach(&pool, fd, &need, &err), TD_EFORMAT);
  assert_int_equal(close(fd), 0);
}

TEST(kv_pool_that_cannot_be) {
  td_err err;
  int fd;
  td_kv_need need = small_need;
  need.ctx_size = 2000;
  td_kv_pool pool;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  assert_int_equal(td_kv_pool_attach(&pool, fd, &need, &err), TD_EINVAL);
  need = small_need;
  need.kv_tokens = 1u << 30;
  need.kv_bytes_per_token = 1ull << 50;
  assert_int_equal(td_kv_pool_attach(&pool, fd, &need, &err), TD_ENOMEM);
  assert_int_equal(td_kv_pool_attach(&pool, fd, &small_need, &err), TD_OK); // nothing was decided
  td_kv_pool_close(&pool);
}
