// tests/unit/test_comm.c - collectives between CPU devices, and what becomes of the others when a
// rank fails.

#include <stdlib.h>

#include "comm/exchange.h"
#include "unit/comm_test.h"

TEST(collectives) {
  static const char *const jitters[] = {NULL, "1", "2"};
  for (size_t j = 0; j < TD_COUNT(jitters); j++) {
    if (jitters[j]) setenv("TANDEM_JITTER", jitters[j], 1);
    for (uint32_t n = 1; n <= 4; n++) {
      ranks r;
      open_ranks(&r, n, "cpu", j ? "host" : "auto", 512);
      assert_string_equal(td_comm_backend(r.ends[0].comm), "host");
      size_t unit = j ? 200 : 1000; // several times around the outbox
      run_ranks(&r, check_all_collectives, &unit);
      close_ranks(&r);
    }
  }
  unsetenv("TANDEM_JITTER");
}

// What has arrived can be used by another stream before the rest is there.
typedef struct {
  rank_end *end;
  td_stream *other;
  td_event *event;
  char *all, *copied;
  size_t n_bytes, n_arrived; // of a block
} arrivals;

static void use_arrived(void *ctx, size_t begin, size_t end) {
  arrivals *a = ctx;
  TD_CHECK(begin == a->n_arrived && end > begin);
  a->n_arrived = end;
  td_event_record(a->event, a->end->stream);
  td_stream_wait(a->other, a->event);
  for (uint32_t r = 0; r < a->end->all->n; r++) {
    const size_t at = r * a->n_bytes + begin;
    td_op_copy(a->other, a->copied + at, a->all + at, end - begin);
  }
}

static void gather_in_pieces(rank_end *end) {
  enum { N = 3000 };
  td_err err;
  const size_t sizes[] = {N, N, N};
  char mine[N], all[3 * N], copied[3 * N];
  for (size_t i = 0; i < N; i++)
    mine[i] = (char)byte_of(end->rank, i);
  arrivals a = {.end = end, .all = all, .copied = copied, .n_bytes = N};
  TD_CHECK(td_stream_open(&a.other, end->dev, &err) == TD_OK);
  TD_CHECK(td_event_open(&a.event, end->dev, &err) == TD_OK);
  const td_all_gather_args args = {
      .mine = mine, .all = all, .n_bytes = sizes, .on_arrival = use_arrived, .ctx = &a};
  rank_ok(end, td_comm_all_gather(end->comm, end->stream, &args, &end->err));
  TD_CHECK(td_stream_sync(a.other, &err) == TD_OK && a.n_arrived == N);
  for (uint32_t r = 0; r < 3; r++) {
    for (size_t i = 0; i < N; i++)
      TD_CHECK((unsigned char)copied[r * N + i] == byte_of(r, i));
  }
  rank_ok(end, rank_sync(end));
  td_event_close(a.event);
  td_stream_close(a.other);
}

TEST(arrivals) {
  ranks r;
  setenv("TANDEM_JITTER", "3", 1);
  open_ranks(&r, 3, "cpu", "host", 512);
  run_ranks(&r, gather_in_pieces, NULL);
  close_ranks(&r);
  unsetenv("TANDEM_JITTER");
}

static void gather_4k(rank_end *end) {
  static const size_t sizes[TD_COMM_MAX_RANKS] = {4096, 4096, 4096};
  char *all = rank_alloc(end, 3 * 4096);
  const td_all_gather_args args = {
      .mine = all + end->rank * (size_t)4096, .all = all, .n_bytes = sizes};
  end->status = td_comm_all_gather(end->comm, end->stream, &args, &end->err);
  if (end->status == TD_OK) rank_sync(end);
  td_stream_sync(end->stream, NULL);
  td_dev_free(end->dev, all);
}

static void fail_or_gather(rank_end *end) {
  if (end->rank == 1) {
    td_comm_abort(end->comm, "rank 1: the disk is on fire");
    td_comm_abort(end->comm, "a second reason");
    end->status = td_comm_check(end->comm, &end->err);
  } else {
    gather_4k(end);
  }
}

static void assert_failed(const ranks *r, const char *why) {
  for (uint32_t i = 0; i < r->n; i++) {
    assert_int_equal(r->ends[i].status, TD_ECANCELED);
    if (!strstr(r->ends[i].err.msg, why)) fail_msg("rank %u says: %s", i, r->ends[i].err.msg);
  }
}

TEST(failed_rank) {
  ranks r;
  open_ranks(&r, 3, "cpu", "host", 512);
  run_ranks(&r, fail_or_gather, NULL);
  assert_failed(&r, "rank 1: the disk is on fire");
  run_ranks(&r, gather_4k, NULL); // and so it stays
  assert_failed(&r, "rank 1: the disk is on fire");
  close_ranks(&r);
}

static void broadcast_sizes(rank_end *end) {
  char data[8192] = {0};
  const size_t n = end->rank == 2 ? 4096 : 8192;
  end->status = td_comm_broadcast(end->comm, end->stream, data, n, 0, &end->err);
  if (end->status == TD_OK) rank_sync(end);
  td_stream_sync(end->stream, NULL);
}

TEST(different_calls) {
  ranks r;
  open_ranks(&r, 3, "cpu", "host", 512);
  run_ranks(&r, broadcast_sizes, NULL);
  assert_failed(&r, "differ in their collective call 0");
  close_ranks(&r);
}

TEST(refusals) {
  static const struct {
    td_comm_opts opts;
    const char *why;
  } refused[] = {
      {{.backend = "mpi", .n_ranks = 1}, "'mpi'"},
      {{.backend = "host", .n_ranks = 0}, "0 ranks"},
      {{.backend = "host", .n_ranks = 9}, "9 ranks"},
      {{.backend = "nccl", .n_ranks = 1}, "is not a GPU"},
  };
  td_dev *devs[9];
  td_comm *comms[9];
  td_err err;
  assert_int_equal(td_dev_open(&devs[0], &(td_dev_opts){.kind = "cpu", .n_threads = 1}, &err),
                   TD_OK);
  for (size_t i = 0; i < TD_COUNT(refused); i++) {
    assert_int_not_equal(td_comm_open(comms, devs, &refused[i].opts, &err), TD_OK);
    if (!strstr(err.msg, refused[i].why)) fail_msg("%s", err.msg);
  }
  td_dev_close(devs[0]);
}

// A layer of DeepSeek-V3 in FP8 and 32K tokens on two GPUs; then uneven, dense, and on one.
TEST(exchange) {
  td_exchange_layer layer = {.n_tokens = 32768,
                             .n_ranks = 2,
                             .dim = 7168,
                             .kv_elements = 576,
                             .expert_bytes = 11277434880};
  td_exchange_bytes b = td_exchange_bytes_of(&layer);
  assert_int_equal(b.kv_bytes, 16384u * 576 * 2);
  assert_int_equal(b.hidden_bytes, 16384u * 7168 * 2);
  assert_int_equal(b.sum_bytes, b.hidden_bytes);
  assert_int_equal(b.expert_bytes, 11277434880 / 2);
  td_exchange_links links = {.rank_gbps = 50, .stream_gbps = 50};
  td_exchange_time t = td_exchange_time_of(&b, &links);
  assert_true(t.layer_s == t.stream_s && t.stream_s > 0.11 && t.stream_s < 0.12);
  links.is_same_link = true;
  t = td_exchange_time_of(&b, &links);
  assert_true(t.layer_s == t.stream_s + t.exchange_s && t.exchange_s > 0.009);
  layer.n_tokens = 10;
  layer.n_ranks = 4;
  b = td_exchange_bytes_of(&layer);
  assert_int_equal(b.hidden_bytes, 8 * 7168 * 2); // of all but its own two
  assert_int_equal(b.sum_bytes, 3 * 2 * 7168 * 2);
  layer.expert_bytes = 0;
  b = td_exchange_bytes_of(&layer);
  assert_true(b.hidden_bytes == 0 && b.sum_bytes == 0 && b.kv_bytes == 8 * 576 * 2);
  layer.n_ranks = 1;
  b = td_exchange_bytes_of(&layer);
  assert_int_equal(b.kv_bytes, 0);
}
