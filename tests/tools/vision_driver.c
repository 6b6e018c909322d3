// tests/tools/vision_driver.c - runs a prompt with images, for tests/golden/test_vision.py.
// usage: vision_driver MODEL_DIR PROMPT OUT CHUNK_TOKENS THREADS N_GREEDY DEVICE
// PROMPT, little endian: u32 n_tokens, u32 n_images, i32 [n_tokens], and for each image u32 at,
// n_tokens, grid_h, grid_w, its hash of 32 bytes, f32 mean [3] and std [3], and its pixels. OUT
// gets, as f32, each image's rows ([1 + n_deep][n_tokens][dim]) and the prompt's logits, and then
// N_GREEDY token ids as i32.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/clock.h"
#include "runtime/session.h"

enum { MOST_IMAGES = 16 };

typedef struct {
  uint32_t n_tokens, n_images;
  int32_t *tokens;
  td_image_input images[MOST_IMAGES];
} prompt;

static void must(bool is_ok, const char *what) {
  if (is_ok) return;
  fprintf(stderr, "vision_driver: %s\n", what);
  exit(1);
}

static void read_exactly(FILE *file, void *out, size_t n) {
  must(fread(out, 1, n, file) == n, "the prompt is cut short");
}

static void *memory(size_t n) {
  void *out = malloc(n);
  must(out, "out of memory");
  return out;
}

static void read_prompt(prompt *p, const char *path, uint32_t patch) {
  FILE *file = fopen(path, "rb");
  must(file, "the prompt cannot be opened");
  read_exactly(file, &p->n_tokens, 4);
  read_exactly(file, &p->n_images, 4);
  must(p->n_images <= MOST_IMAGES, "too many images");
  p->tokens = memory(p->n_tokens * sizeof *p->tokens);
  read_exactly(file, p->tokens, p->n_tokens * sizeof *p->tokens);
  for (uint32_t i = 0; i < p->n_images; i++) {
    td_image_input *image = &p->images[i];
    uint32_t words[4];
    read_exactly(file, words, sizeof words);
    *image = (td_image_input){
        .at = words[0], .n_tokens = words[1], .grid_h = words[2], .grid_w = words[3]};
    read_exactly(file, image->hash, sizeof image->hash);
    read_exactly(file, &image->norm, sizeof image->norm);
    const size_t n = (size_t)words[2] * words[3] * patch * patch * 3;
    uint8_t *rgb = memory(n);
    read_exactly(file, rgb, n);
    image->rgb = rgb;
  }
  fclose(file);
}

static void write_rows(td_session *s, const prompt *p, FILE *out, td_err *err) {
  const size_t of_token = (1 + s->config->vision.n_deep) * (size_t)s->config->dim;
  for (uint32_t i = 0; i < p->n_images; i++) {
    const td_image_rows *rows;
    const double start = td_clock_s();
    must(td_vision_pin(s->devices.vision, &p->images[i], &rows, err) == TD_OK, err->msg);
    fprintf(stderr, "%u x %u patches: %.3f s\n", p->images[i].grid_w, p->images[i].grid_h,
            td_clock_s() - start);
    const size_t n = of_token * p->images[i].n_tokens;
    if (td_dev_act_dtype(s->devices.dev) == TD_BF16) {
      float *values = memory(n * sizeof *values);
      td_bf16_values(values, (const uint16_t *)(const void *)rows->rows, n);
      fwrite(values, sizeof *values, n, out);
      free(values);
    } else {
      fwrite(rows->rows, sizeof(float), n, out);
    }
    td_vision_unpin(s->devices.vision, rows);
  }
}

static void write_logits(td_session *s, const prompt *p, uint32_t chunk, FILE *out, td_err *err) {
  must(td_kv_reserve(s->kv, s->seq, p->n_tokens, err) == TD_OK, err->msg);
  for (uint32_t done = 0, n; done < p->n_tokens; done += n) {
    n = p->n_tokens - done < chunk ? p->n_tokens - done : chunk;
    td_step_seq seq = {.tokens = p->tokens + done,
                       .n_tokens = n,
                       .n_past = done,
                       .past = p->tokens,
                       .images = p->images,
                       .n_images = p->n_images,
                       .want = TD_WANT_ALL};
    seq.pages = td_kv_pages(s->kv, s->seq, &seq.n_pages);
    must(td_engine_step(s->engine, &seq, 1, err) == TD_OK, err->msg);
    fwrite(td_engine_logits(s->engine), sizeof(float), (size_t)n * s->config->n_vocab, out);
  }
}

static bool note_token(void *ctx, int32_t id, float logprob) {
  (void)logprob;
  fwrite(&id, sizeof id, 1, ctx);
  return true;
}

int main(int argc, char **argv) {
  must(argc == 8, "give MODEL_DIR PROMPT OUT CHUNK_TOKENS THREADS N_GREEDY DEVICE");
  const uint32_t chunk = (uint32_t)atoi(argv[4]);
  const td_session_opts opts = {.runtime = {.model_dir = argv[1],
                                            .device = argv[7],
                                            .prefill_chunk = chunk,
                                            .n_threads = (uint32_t)atoi(argv[5]),
                                            .activations = TD_ACTIVATIONS_F32}};
  td_session *s;
  td_err err;
  must(td_session_open(&s, &opts, &err) == TD_OK, err.msg);
  must(s->devices.vision, "the model does not see");
  prompt p;
  read_prompt(&p, argv[2], s->config->vision.patch);
  FILE *out = fopen(argv[3], "wb");
  must(out, "the output cannot be opened");
  write_rows(s, &p, out, &err);
  if (p.n_tokens) write_logits(s, &p, chunk, out, &err);
  const td_generate_args args = {.prompt = p.tokens,
                                 .n_prompt = p.n_tokens,
                                 .images = p.images,
                                 .n_images = p.n_images,
                                 .max_tokens = (uint32_t)atoi(argv[6]),
                                 .ignore_eos = true,
                                 .on_token = note_token,
                                 .ctx = out};
  td_generate_stats stats;
  if (args.max_tokens) must(td_session_generate(s, &args, &stats, &err) == TD_OK, err.msg);
  td_session_close(s);
  for (uint32_t i = 0; i < p.n_images; i++)
    free((void *)p.images[i].rgb);
  free(p.tokens);
  return fclose(out) ? 1 : 0;
}
