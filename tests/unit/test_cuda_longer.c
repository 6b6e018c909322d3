// tests/unit/test_cuda_longer.c - a prompt in the memory of dense weights: they are dropped, an
// engine of its own streams them and the experts, and then the others go on as before.
// CTest: gpu no-asan no-tsan

#include "runtime/devices.h"
#include "unit/engine_test.h"

static void open_longer(lanes *l, td_engine **out) {
  td_devices devices = {.dev = l->dev,
                        .stream_from = STREAM_PROMPT,
                        .long_steps = {.prefill_chunk = LANE_TOKENS,
                                       .stream_bytes = l->opts.stream_bytes,
                                       .n_streamed_dense = td_model_config_of(l->model)->n_layers}};
  const size_t before = td_dev_free_vram_bytes(l->dev);
  td_dev_drop_weights(l->dev);
  assert_true(td_dev_free_vram_bytes(l->dev) > before);
  td_devices_open_long_engine(out, &devices, l->model, &l->opts);
  assert_non_null(*out);
}

static void prefill(lanes *l, td_engine *engine, uint32_t s) {
  const td_step_seq seq = lane_seq(l, s, false);
  td_err err;
  if (td_engine_step(engine, &seq, 1, &err) != TD_OK) fail_msg("%s", err.msg);
  keep_row(l, engine, 0, s, 0);
}

// The caller's. Every prompt, by the engine with usual steps or, from the second one on, by an
// engine with longer ones, is followed by its answer, of which most steps are graphs.
static float *rows_of(const small_model *m, bool has_longer, size_t *n_bytes) {
  lanes l = {.random = 0};
  open_lanes(&l, m, "cuda");
  for (uint32_t s = 0; s < LANE_SEQS; s++) {
    td_engine *longer = NULL;
    if (has_longer && s > 0) open_longer(&l, &longer);
    prefill(&l, longer ? longer : l.prefill, s);
    if (longer) {
      const td_stream_progress progress = td_engine_stream_progress(longer);
      assert_true(progress.queued_bytes > 0 && progress.dense_bytes > 0);
    }
    td_engine_close(longer);
    while (has_answers_left(&l, 1u << s))
      decode_lanes(&l, 1u << s);
  }
  *n_bytes = LANE_SEQS * (LANE_DECODE + 1) * l.n_vocab * sizeof *l.out;
  close_lanes(&l);
  return l.out;
}

TEST(prompts_in_the_memory_of_dense_weights) {
  td_dev *dev;
  td_err err;
  if (td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err) != TD_OK) {
    if (getenv("TANDEM_CUDA_LIB")) fail_msg("%s", err.msg);
    print_message("skipped: %s\n", err.msg);
    skip();
  }
  td_dev_close(dev);
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    size_t n_bytes;
    float *want = rows_of(&small_models[i], false, &n_bytes);
    float *got = rows_of(&small_models[i], true, &n_bytes);
    assert_memory_equal(got, want, n_bytes);
    free(want);
    free(got);
  }
}
