// tests/unit/test_cuda_weights.c - what the CUDA device keeps of weights, and the choices of
// heuristics.c.
// CTest: gpu

#include <stdio.h>

#include "unit/cuda_test.h"

// Small copies share a piece of memory, and so do larger ones whose last page would stay half
// empty; whole pages do not, nor does what no piece holds.
TEST(copies_share_pages) {
  enum { MIB = 1 << 20 };
  static const struct {
    size_t n_bytes, n_pieces;
  } steps[] = {{7, 1},        {3 * MIB, 1},  {4 * MIB, 2},  {65 * MIB, 3}, {13 * MIB, 3},
               {13 * MIB, 3}, {13 * MIB, 3}, {13 * MIB, 3}, {13 * MIB, 4}};
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  dev->page_bytes = 2 * MIB;
  uint8_t *host = malloc(65 * MIB), *got = malloc(65 * MIB);
  const void *device[TD_COUNT(steps)];
  td_status st = TD_OK;
  td_err err;
  for (size_t i = 0; i < 65 * MIB; i++)
    host[i] = (uint8_t)(i * 37 >> 3);
  for (size_t i = 0; i < TD_COUNT(steps); i++) {
    device[i] = td_cuda_on_device(dev, host + i, steps[i].n_bytes - i, &st, &err);
    assert_int_equal(st, TD_OK);
    assert_int_equal((uintptr_t)device[i] % 256, 0);
    assert_int_equal(dev->n_pieces, steps[i].n_pieces);
  }
  for (size_t i = 0; i < TD_COUNT(steps); i++) {
    cuda_get(&f, got, device[i], steps[i].n_bytes - i);
    assert_memory_equal(got, host + i, steps[i].n_bytes - i);
  }
  free(host);
  free(got);
  cuda_close(&f);
}

TEST(weights_are_copied_once) {
  enum { N = 3000 }; // more than the table has slots for at first
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  int32_t *host = malloc(N * sizeof *host);
  const void **device = malloc(N * sizeof *device);
  td_status st = TD_OK;
  td_err err;
  for (int i = 0; i < N; i++) {
    host[i] = i;
    device[i] = td_cuda_on_device(dev, &host[i], sizeof host[i], &st, &err);
  }
  for (int i = 0; i < N; i++) {
    const void *again = td_cuda_on_device(dev, &host[i], sizeof host[i], &st, &err);
    int32_t value;
    assert_int_equal(st, TD_OK);
    assert_ptr_equal(again, device[i]);
    if (i % 97 == 0) {
      cuda_get(&f, &value, again, sizeof value);
      assert_int_equal(value, i);
    }
  }
  assert_null(td_cuda_on_device(dev, NULL, 4, &st, &err));
  assert_int_equal(st, TD_OK);
  assert_null(td_cuda_on_device(dev, host, (size_t)1 << 50, &st, &err));
  assert_int_equal(st, TD_ENOMEM);
  assert_non_null(strstr(err.msg, "do not fit the GPU"));
  free(host);
  free(device);
  cuda_close(&f);
}

TEST(how_weights_are_read) {
  float scale;
  static const struct {
    td_dtype dtype, scale_dtype;
    uint32_t cols, scale_cols;
    td_cu_read want;
  } cases[] = {
      {TD_F32, TD_F32, 64, 0, TD_CU_READ_F32},
      {TD_F16, TD_F32, 64, 0, TD_CU_READ_F16},
      {TD_BF16, TD_F32, 64, 0, TD_CU_READ_BF16},
      {TD_BF16, TD_F32, 68, 0, TD_CU_READ_ANY},
      {TD_F8E4M3, TD_F32, 640, 128, TD_CU_READ_F8},
      {TD_F8E4M3, TD_F32, 640, 32, TD_CU_READ_F8},
      {TD_F8E4M3, TD_F32, 640, 16, TD_CU_READ_ANY},
      {TD_F8E4M3, TD_F32, 640, 384, TD_CU_READ_ANY}, // no power of two
      {TD_F8E4M3, TD_F32, 640, 700, TD_CU_READ_F8},  // but a row
      {TD_F8E4M3, TD_F8E8M0, 640, 128, TD_CU_READ_ANY},
      {TD_I8, TD_F32, 640, 640, TD_CU_READ_I8},
      {TD_I4, TD_BF16, 640, 32, TD_CU_READ_I4},
      {TD_I4, TD_BF16, 640, 16, TD_CU_READ_ANY},
      {TD_F4E2M1, TD_F8E4M3, 640, 16, TD_CU_READ_NVFP4},
      {TD_F4E2M1, TD_F8E8M0, 640, 32, TD_CU_READ_MXFP4},
      {TD_F4E2M1, TD_F8E8M0, 640, 16, TD_CU_READ_ANY},
      {TD_F4E2M1, TD_F8E4M3, 640, 32, TD_CU_READ_ANY},
      {TD_Q4_K, TD_F32, 512, 0, TD_CU_READ_BLOCKS},
      {TD_MXFP4, TD_F32, 96, 0, TD_CU_READ_BLOCKS},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_weight w = {.dtype = cases[i].dtype,
                   .scale_dtype = cases[i].scale_dtype,
                   .cols = cases[i].cols,
                   .scale_cols = cases[i].scale_cols,
                   .scale = cases[i].scale_cols ? &scale : NULL};
    assert_int_equal(td_cuda_read_of(&w, true), cases[i].want);
    assert_int_equal(td_cuda_read_of(&w, false), TD_CU_READ_ANY);
  }
}

TEST(which_gpus_add_in_f16) {
  static const struct {
    const char *name;
    int capability;
    bool adds;
  } gpus[] = {
      {"NVIDIA GeForce RTX 3090", 86, true},  {"NVIDIA GeForce RTX 4090 Laptop GPU", 89, true},
      {"NVIDIA GeForce RTX 5090", 120, true}, {"NVIDIA RTX 6000 Ada Generation", 89, false},
      {"NVIDIA A100-SXM4-40GB", 80, false},   {"NVIDIA H100 80GB HBM3", 90, false}};
  for (size_t i = 0; i < TD_COUNT(gpus); i++) {
    td_cu_props props = {.capability = gpus[i].capability};
    snprintf(props.name, sizeof props.name, "%s", gpus[i].name);
    assert_int_equal(td_cuda_adds_f16(&props), gpus[i].adds);
  }
}

TEST(which_kernel_multiplies) {
  float scale;
  td_weight bf16 = {.dtype = TD_BF16, .rows = 8, .cols = 64};
  td_weight f8 = {.dtype = TD_F8E4M3, .scale = &scale, .scale_cols = 128, .cols = 64};
  td_weight f32 = {.dtype = TD_F32, .rows = 8, .cols = 64};
  td_weight f4 = {.dtype = TD_F4E2M1, .scale = &scale, .scale_cols = 16, .cols = 64};
  const td_cu_read f8_read = TD_CU_READ_F8, any = TD_CU_READ_ANY;
  assert_int_equal(td_cuda_gemm_of(&f8, f8_read, 64, true), CUDA_GEMM_VEC);
  assert_int_equal(td_cuda_gemm_of(&f8, f8_read, 65, true), CUDA_GEMM_WGMMA);
  assert_int_equal(td_cuda_gemm_of(&f8, f8_read, 65, false), CUDA_GEMM_MMA);
  assert_int_equal(td_cuda_gemm_of(&f8, any, 65, true), CUDA_GEMM_MMA);
  assert_int_equal(td_cuda_gemm_of(&f32, TD_CU_READ_F32, 1000, true), CUDA_GEMM_VEC);
  assert_int_equal(td_cuda_tile_tokens(CUDA_GEMM_MMA, 500), 64);
  assert_int_equal(td_cuda_tile_tokens(CUDA_GEMM_WGMMA, 64), 64);
  assert_int_equal(td_cuda_tile_tokens(CUDA_GEMM_WGMMA, 65), 128);
  assert_false(td_cuda_use_blas(&bf16, 16));
  assert_true(td_cuda_use_blas(&bf16, 17));
  assert_false(td_cuda_use_blas(&f8, 64));
  assert_true(td_cuda_use_blas(&f8, 65));
  assert_false(td_cuda_use_blas(&f4, 255));
  assert_true(td_cuda_use_blas(&f4, 256));
  assert_false(td_cuda_use_blas(&f32, 1000));
}

TEST(sizes_of_launches) {
  static const struct {
    uint32_t n_sms;
    int capability;
    uint32_t share;
  } shares[] = {{132, 90, 96}, {170, 120, 120}, {128, 89, 96},
                {16, 80, 12},  {10, 90, 0},     {4, 80, 0}};
  for (size_t i = 0; i < TD_COUNT(shares); i++)
    assert_int_equal(td_cuda_share_sms(shares[i].n_sms, shares[i].capability), shares[i].share);
  assert_int_equal(td_cuda_tiles_at_once(0, 170, 200), 170);
  assert_int_equal(td_cuda_tiles_at_once(199, 170, 200), 170);
  assert_int_equal(td_cuda_tiles_at_once(200, 170, 200), 8);
  assert_int_equal(td_cuda_tiles_at_once(200, 3, 200), 3);
  static const uint32_t tokens[][2] = {{1, 8}, {8, 8}, {9, 16}, {16, 16}, {900, 16}};
  for (size_t i = 0; i < TD_COUNT(tokens); i++)
    assert_int_equal(td_cuda_tile_tokens(CUDA_GEMM_VEC, tokens[i][0]), tokens[i][1]);
  static const uint32_t wide[][2] = {{16, 0}, {17, 32}, {32, 32}, {33, 64}, {64, 64}, {65, 0}};
  for (size_t i = 0; i < TD_COUNT(wide); i++) {
    assert_int_equal(td_cuda_wide_tokens(TD_CU_READ_F8, wide[i][0]), wide[i][1]);
    assert_int_equal(td_cuda_wide_tokens(TD_CU_READ_BLOCKS, wide[i][0]), 0);
  }
  static const uint32_t passes[][2] = {{1, 1}, {64, 1}, {65, 2}, {128, 2}, {129, 1}};
  const td_weight e4m3 = {.dtype = TD_F8E4M3}, fp4 = {.dtype = TD_F4E2M1};
  for (size_t i = 0; i < TD_COUNT(passes); i++) {
    assert_int_equal(td_cuda_wide_passes(&e4m3, TD_CU_READ_F8, passes[i][0]), passes[i][1]);
    assert_int_equal(td_cuda_wide_passes(&e4m3, TD_CU_READ_ANY, passes[i][0]), 1);
    assert_int_equal(td_cuda_wide_passes(&fp4, TD_CU_READ_NVFP4, passes[i][0]), 1);
  }
  // rows, columns, SMs, warps
  static const uint32_t rows[][4] = {
      {1, 7168, 132, 24},     {2112, 7168, 132, 24}, {2113, 7168, 132, 12}, {4096, 7168, 132, 12},
      {7168, 16384, 132, 6},  {8192, 7168, 132, 6},  {6144, 7168, 132, 8},  {129280, 7168, 132, 8},
      {24576, 1536, 132, 2},  {24576, 1536, 108, 4}, {7168, 2048, 132, 6},  {7168, 7168, 82, 4},
      {18432, 14336, 132, 8}, {7168, 18432, 132, 6}};
  for (size_t i = 0; i < TD_COUNT(rows); i++) {
    const td_weight w = {.dtype = TD_F8E4M3, .rows = rows[i][0], .cols = rows[i][1]};
    assert_int_equal(td_cuda_vec_warps(&w, 1, w.rows, false, rows[i][2]), rows[i][3]);
    assert_int_equal(td_cuda_vec_warps(&w, 1, w.rows, true, rows[i][2]), 8);
  }
  const td_weight gate = {.dtype = TD_F8E4M3, .rows = 18432, .cols = 7168}; // and up
  assert_int_equal(td_cuda_vec_warps(&gate, 2, gate.rows, false, 132), 8);
}

// A matrix in pieces is the matrix.
TEST(pieces_of_a_matrix) {
  enum { ROWS = 24, COLS = 64, TOKENS = 256, CUT = 16 };
  td_weight wide = {.dtype = TD_F8E4M3, .rows = 100, .cols = 1u << 24}, v3 = wide;
  assert_int_equal(td_cuda_piece_rows(&wide, 100), 16);
  v3.cols = 7168;
  assert_int_equal(td_cuda_piece_rows(&v3, 18432), 4680);
  assert_int_equal(td_cuda_piece_rows(&v3, 2048), 2048);
  CUDA_OPEN(f);
  td_err err;
  ref_weight w = ref_make_weight(&f.rng, TD_F8E4M3, ROWS, COLS, 8, 32);
  td_weight device;
  assert_int_equal(td_cuda_weight((td_cuda_dev *)f.dev, &w.w, "w", &device, &err), TD_OK);
  float *x = cuda_floats(&f, TOKENS * COLS), got[2][TOKENS * ROWS];
  float *y = cuda_alloc(&f, sizeof got[0]);
  td_cuda_matmul m = {.w = &device,
                      .x = cuda_put_bf16(&f, x, TOKENS * COLS),
                      .y = y,
                      .x_stride = COLS,
                      .y_stride = ROWS,
                      .n_tokens = TOKENS,
                      .n_rows = ROWS,
                      .y_f32 = true};
  td_cuda_stream *stream = (td_cuda_stream *)f.stream;
  assert_int_equal(td_cuda_run_matmul(stream, &m, &err), TD_OK);
  cuda_get(&f, got[0], y, sizeof got[0]);
  m.n_rows = CUT;
  assert_int_equal(td_cuda_run_matmul(stream, &m, &err), TD_OK);
  m.row0 = CUT;
  m.n_rows = ROWS - CUT;
  m.y = y + CUT;
  assert_int_equal(td_cuda_run_matmul(stream, &m, &err), TD_OK);
  cuda_get(&f, got[1], y, sizeof got[1]);
  for (size_t i = 0; i < TOKENS * ROWS; i++) // cuBLAS may sum in another order
    cuda_assert_within(got[1][i], got[0][i], fabsf(got[0][i]) * 1e-4 + 1e-4, "piece", i);
  free(x);
  ref_free_weight(&w);
  cuda_close(&f);
}

TEST(splits) {
  for (uint32_t max_keys = 1; max_keys < 1u << 20; max_keys += 1 + max_keys / 3) {
    for (uint32_t n_blocks = 1; n_blocks <= 4; n_blocks++) {
      uint32_t keys, n, few = n_blocks <= 2;
      td_cuda_splits(max_keys, n_blocks, &keys, &n);
      assert_true((uint64_t)keys * n >= max_keys && (uint64_t)keys * (n - 1) < max_keys);
      assert_true(n <= (few ? 128 : 64) && (keys & (keys - 1)) == 0);
      // the same for all usual contexts
      if (max_keys <= 256 * 64) assert_int_equal(keys, few ? 128 : 256);
    }
  }
}

// As many as a window can touch wherever it ends, of a length that no context changes.
TEST(splits_of_a_window) {
  static const uint32_t windows[] = {1, 2, 128, 129, 256, 257, 300, 5000};
  for (size_t i = 0; i < TD_COUNT(windows); i++) {
    for (uint32_t n_blocks = 1; n_blocks <= 8; n_blocks += 7) {
      const uint32_t w = windows[i];
      uint32_t keys, n, keys_of_few, n_of_few, most = 0;
      td_cuda_window_splits(w, 100000, n_blocks, &keys, &n);
      for (uint32_t end = w; end < w + 2 * keys; end++) {
        const uint32_t touched = (end - 1) / keys - (end - w) / keys + 1;
        if (touched > most) most = touched;
      }
      assert_int_equal(n, most);
      td_cuda_window_splits(w, 7, n_blocks, &keys_of_few, &n_of_few);
      assert_int_equal(keys_of_few, keys);
      assert_int_equal(n_of_few, 1);
    }
  }
}

// A launch is sized for the most splits that any length has, and lengths alone decide on splits.
TEST(splits_of_latents) {
  static const struct {
    uint32_t n_keys, keys;
  } cases[] = {{1, 64},      {1024, 64},   {1025, 128},  {4096, 128},  {4097, 256},
               {16384, 256}, {16385, 512}, {32768, 512}, {32769, 1024}};
  for (size_t i = 0; i < TD_COUNT(cases); i++)
    assert_int_equal(td_cu_latent_split(cases[i].n_keys, 64), cases[i].keys);
  for (uint32_t least = 64; least <= 2048; least *= 32) {
    uint32_t most = 1;
    for (uint32_t n = 1; n < 70000; n++) {
      const uint32_t keys = td_cu_latent_split(n, least), n_splits = (n - 1) / keys + 1;
      if (n_splits > most) most = n_splits;
      if (n % 61 == 0) assert_int_equal(td_cuda_latent_splits(n, least), most);
    }
    assert_true(most <= TD_CU_MAX_SPLITS);
  }
  assert_true(td_cuda_latent_keys(64) == td_cuda_latent_keys(1));
}

TEST(splits_that_a_block_adds_up) {
  assert_false(td_cuda_folds_by_block(1, 4, 64, 132));
  assert_false(td_cuda_folds_by_block(4, 4, 32, 132));
  assert_true(td_cuda_folds_by_block(4, 4, 33, 132)); // 9 blocks in a row
  assert_true(td_cuda_folds_by_block(33, 4, 1, 132));
}

TEST(delta_rules_in_chunks) {
  const td_delta_rule_op_args qwen = {.shape = {.k_dim = 128, .v_dim = 128},
                                      .batch = {.page_tokens = 512}};
  td_delta_rule_op_args a = qwen;
  assert_true(td_cuda_takes_delta_chunks(&a));
  a.shape.k_dim = 64; // half of each product would be of zeros
  assert_false(td_cuda_takes_delta_chunks(&a));
  a.shape.k_dim = 100;
  assert_false(td_cuda_takes_delta_chunks(&a));
  a = qwen;
  a.shape.v_dim = 36;
  assert_false(td_cuda_takes_delta_chunks(&a));
  a = qwen;
  a.batch.page_tokens = TD_CU_DELTA_CHUNK / 2;
  assert_false(td_cuda_takes_delta_chunks(&a));
  a = qwen;
  a.qkv = (const uint16_t *)24;
  assert_false(td_cuda_takes_delta_chunks(&a));
}

TEST(prompts_of_a_launch) {
  enum { SEQS = 40 };
  int32_t q_begin[SEQS + 1] = {0}, position[SEQS * 130];
  for (int32_t s = 0; s < SEQS; s++) { // of 0, 1, 129, 0, 1, .. tokens, after 10 others
    const int32_t n = s % 3 == 2 ? 129 : s % 3;
    q_begin[s + 1] = q_begin[s] + n;
    for (int32_t t = 0; t < n; t++)
      position[q_begin[s] + t] = 10 + t;
  }
  td_batch_view b = {.n_tokens = (uint32_t)q_begin[SEQS],
                     .n_seqs = SEQS,
                     .max_pages = 2,
                     .page_tokens = 64,
                     .host_q_begin = q_begin,
                     .host_position = position};
  td_cu_prefill_list list;
  assert_int_equal(td_cuda_list_prompts(&b, 0, 0, SIZE_MAX, &list), TD_CU_PREFILL_SEQS);
  assert_int_equal(td_cuda_list_prompts(&b, TD_CU_PREFILL_SEQS, 0, SIZE_MAX, &list), SEQS);
  assert_int_equal(list.n_seqs, SEQS - TD_CU_PREFILL_SEQS);
  assert_int_equal(td_cuda_list_prompts(&b, 1, 0, 11 + 128, &list),
                   4); // pages hold 128 of 139 keys
  assert_int_equal(list.n_seqs, 3);
  assert_int_equal(list.n_keys, 11 + 128);
  assert_int_equal(list.n_tiles, 1 + 2);
  assert_int_equal(list.max_keys, 128);
  assert_int_equal(list.seqs[1].seq, 2);
  assert_int_equal(list.seqs[1].key_begin, 11);
  assert_int_equal(list.seqs[1].tile_begin, 1);
  assert_int_equal(list.seqs[2].n_keys, 0);
  assert_int_equal(list.seqs[2].tile_begin, 3);
  assert_int_equal(td_cuda_list_prompts(&b, 2, 0, 1, &list), 3); // one at least
  // a window leaves out whole tiles that none of its tokens sees
  for (int32_t t = q_begin[2]; t < q_begin[3]; t++)
    position[t] = 1010 + t - q_begin[2];
  b.max_pages = 200;
  assert_int_equal(td_cuda_list_prompts(&b, 2, 100, 250, &list), 4);
  assert_int_equal(list.seqs[0].first, 896);
  assert_int_equal(list.seqs[0].n_keys, 1010 + 129 - 896);
  assert_int_equal(list.n_keys, 1010 + 129 - 896);
  assert_int_equal(td_cuda_list_prompts(&b, 1, 100, SIZE_MAX, &list), 1 + TD_CU_PREFILL_SEQS);
  assert_int_equal(list.seqs[0].first, 0); // it sees all
  assert_int_equal(list.seqs[0].n_keys, 11);
  b.max_pages = 2;
  b.host_position = NULL;
  assert_int_equal(td_cuda_list_prompts(&b, 5, 0, SIZE_MAX, &list), 6);
  assert_int_equal(list.n_keys, 128);
  assert_int_equal(list.n_tiles, (b.n_tokens + 127) / 128);
}
