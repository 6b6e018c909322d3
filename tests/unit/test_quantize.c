// tests/unit/test_quantize.c - whole checkpoints made smaller: what changes and what stays, runs
// that stop and go on, and what is refused.
// CTest: no-tsan

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "model/checkpoint/shard_writer.h"
#include "model/quantize/quantize.h"
#include "support/checkpoint.h"
#include "unit/testing.h"

typedef struct {
  unsigned made, kept;
} progress;

static void count(void *ctx, const char *shard, size_t idx, size_t n_shards, bool kept) {
  (void)shard;
  (void)idx;
  progress *p = ctx;
  assert_int_equal(n_shards, CK_SHARDS);
  if (kept) {
    p->kept++;
  } else {
    p->made++;
  }
}

typedef struct {
  checkpoint ck;
  char out[80];
  progress progress;
  td_quantize_report report;
} fixture;

static void start(fixture *f) {
  ck_deepseek(&f->ck);
  snprintf(f->out, sizeof f->out, "%s-out", f->ck.dir);
  f->report = (td_quantize_report){0};
}

static char *out_path(const fixture *f, const char *file) {
  static char path[512];
  snprintf(path, sizeof path, "%s/%s", f->out, file);
  return path;
}

static bool there(const fixture *f, const char *file) {
  return td_file_exists(out_path(f, file));
}

static void remove_file(const char *folder, const char *name) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  assert_int_equal(remove(path), 0);
}

static void finish(fixture *f) {
  DIR *dir = opendir(f->out);
  for (struct dirent *e; dir && (e = readdir(dir));) {
    if (e->d_name[0] != '.') remove(out_path(f, e->d_name));
  }
  if (dir) closedir(dir);
  rmdir(f->out);
  td_quantize_report_free(&f->report);
  ck_free(&f->ck);
}

static td_status quantize(fixture *f, const char *to, td_err *err) {
  const char *names;
  td_quantize_report_free(&f->report);
  f->progress = (progress){0};
  return td_quantize(&(td_quantize_opts){.in = f->ck.dir,
                                         .out = f->out,
                                         .encoding = td_encoding_find(to, &names),
                                         .n_threads = 2,
                                         .progress = count,
                                         .ctx = &f->progress},
                     &f->report, err);
}

static void quantize_ok(fixture *f, const char *to) {
  td_err err;
  if (quantize(f, to, &err) != TD_OK) fail_msg("%s: %s", to, err.msg);
}

static td_model *open_out(const fixture *f) {
  td_model *m;
  td_err err;
  if (td_model_open(&m, f->out, &err) != TD_OK) fail_msg("%s", err.msg);
  return m;
}

// Matrices of 32 columns become INT4; those of other widths, of latents, and the output matrix
// become INT8; what is no layer stays.
TEST(makes_int4) {
  fixture f;
  start(&f);
  ck_write(&f.ck);
  ck_write_file(&f.ck, "tokenizer.json", "{\"x\": 1}", 8);
  ck_write_file(&f.ck, "pytorch_model.bin", "old", 3);
  char folder[80];
  snprintf(folder, sizeof folder, "%s/encoding", f.ck.dir);
  assert_int_equal(mkdir(folder, 0777), 0);
  ck_write_file(&f.ck, "encoding/encoder.py", "code", 4);
  ck_write_file(&f.ck, "encoding/notes.txt", "notes", 5);
  quantize_ok(&f, "int4-g32");
  td_model *m = open_out(&f);
  const td_layer *l0 = td_model_layer(m, 0), *l1 = td_model_layer(m, 1);
  assert_int_equal(l0->mlp_gate.dtype, TD_I4);
  assert_int_equal(l0->q_a.dtype, TD_I4);
  assert_int_equal(l1->gate[7].dtype, TD_I4);
  assert_int_equal(l1->gate[7].scale_dtype, TD_BF16);
  assert_int_equal(l1->down[7].dtype, TD_I8);  // 16 columns
  assert_int_equal(l0->mlp_down.dtype, TD_I8); // 48
  assert_int_equal(l1->kv_a.dtype, TD_I8);
  assert_int_equal(l1->kv_b.dtype, TD_I8);
  assert_int_equal(l1->kv_b.scale_rows, 1);
  assert_int_equal(l1->kv_b.scale_cols, l1->kv_b.cols);
  assert_int_equal(l1->router.dtype, TD_BF16);
  assert_int_equal(td_model_embed(m)->dtype, TD_BF16);
  assert_int_equal(td_model_lm_head(m)->dtype, TD_I8);
  const ck_tensor *norm = ck_find(&f.ck, "model.norm.weight");
  for (uint64_t i = 0; i < ck_bytes(norm); i++)
    assert_int_equal(((const uint8_t *)td_model_final_norm(m).data)[i], ck_byte(norm, i));
  td_model_close(m);
  // INT4: two of the dense MLP, two of each expert and of the shared one, q_a twice; INT8: their
  // third ones, the output matrix, and q_b, kv_a, kv_b and o twice
  size_t n_int4 = 0;
  for (size_t i = 0; i < f.report.n_tensors; i++) {
    const td_quantized *t = &f.report.tensors[i];
    bool is_int8 = t->error < 0.02;
    assert_true(t->error > 0 && t->error < 0.5);
    assert_true(is_int8 || t->cols == 32);
    assert_null(strstr(t->name, ".weight"));
    n_int4 += !is_int8;
  }
  assert_int_equal(n_int4, 2 + 2 * 8 + 2 + 2);
  assert_int_equal(f.report.n_tensors - n_int4, 1 + 8 + 1 + 1 + 2 * 4);
  assert_true(f.report.bytes_out < f.report.bytes_in);
  assert_int_equal(f.progress.made, CK_SHARDS);
  assert_true(there(&f, "tokenizer.json") && there(&f, "quantize_report.json"));
  assert_false(there(&f, "pytorch_model.bin"));
  assert_false(there(&f, "model-00001-of-00003.safetensors.done"));
  assert_true(there(&f, "encoding/encoder.py"));
  assert_false(there(&f, "encoding/notes.txt"));
  remove(out_path(&f, "encoding/encoder.py"));
  remove_file(folder, "encoder.py");
  remove_file(folder, "notes.txt");
  remove(folder);
  finish(&f);
}

TEST(makes_fp8_and_mxfp4) {
  fixture f;
  start(&f);
  ck_write(&f.ck);
  quantize_ok(&f, "fp8");
  td_model *m = open_out(&f);
  const td_layer *l1 = td_model_layer(m, 1);
  assert_int_equal(l1->down[3].dtype, TD_F8E4M3);
  assert_int_equal(l1->down[3].scale_rows, 128);
  assert_int_equal(l1->kv_b.dtype, TD_F8E4M3);
  assert_int_equal(l1->router.dtype, TD_BF16);
  assert_int_equal(td_model_lm_head(m)->dtype, TD_I8);
  td_model_close(m);
  finish(&f);

  start(&f); // from FP8, of which what is not encoded becomes BF16
  ck_set(&f.ck, "quantization_config",
         "{\"quant_method\": \"fp8\", \"weight_block_size\": [16, 16]}");
  ck_make_fp8(&f.ck, "model.layers.1.mlp.experts.0.up_proj.weight", 16, "F32");
  ck_make_fp8(&f.ck, "model.layers.1.mlp.experts.0.down_proj.weight", 16, "F32");
  ck_write(&f.ck);
  quantize_ok(&f, "mxfp4");
  m = open_out(&f);
  l1 = td_model_layer(m, 1);
  assert_int_equal(l1->up[0].dtype, TD_F4E2M1);
  assert_int_equal(l1->down[0].dtype, TD_I8);
  assert_int_equal(td_model_stats_of(m).bytes_by_dtype[TD_F8E4M3], 0);
  td_model_close(m);
  finish(&f);
}

TEST(goes_on_where_it_stopped) {
  fixture f;
  td_err err;
  start(&f);
  ck_write(&f.ck);
  mkdir(f.out, 0777);
  mkdir(out_path(&f, "config.json"), 0777); // stops the run when all shards are made
  assert_int_equal(quantize(&f, "int4-g32", &err), TD_EIO);
  assert_non_null(strstr(err.msg, "config.json"));
  assert_int_equal(f.progress.made, CK_SHARDS);
  assert_false(there(&f, "model.safetensors.index.json"));
  size_t n_tensors = f.report.n_tensors;
  double error = f.report.tensors[n_tensors - 1].error;

  assert_int_equal(quantize(&f, "int4-g32", &err), TD_EIO);
  assert_int_equal(f.progress.kept, CK_SHARDS);
  assert_int_equal(f.report.n_tensors, n_tensors);
  assert_true(f.report.tensors[n_tensors - 1].error == error);

  // A flipped bit, a shard cut short, a note that is lost: each is made again.
  int fd = open(out_path(&f, "model-00001-of-00003.safetensors"), O_RDWR);
  uint8_t byte;
  assert_int_equal(pread(fd, &byte, 1, 5000), 1);
  byte ^= 4;
  assert_int_equal(pwrite(fd, &byte, 1, 5000), 1);
  close(fd);
  assert_int_equal(truncate(out_path(&f, "model-00002-of-00003.safetensors"), 100), 0);
  assert_int_equal(quantize(&f, "int4-g32", &err), TD_EIO);
  assert_int_equal(f.progress.made, 2);
  remove(out_path(&f, "model-00003-of-00003.safetensors.done"));
  assert_int_equal(quantize(&f, "int4-g32", &err), TD_EIO);
  assert_int_equal(f.progress.made, 1);
  // So is everything when the source has changed, or something else is wanted.
  assert_int_equal(quantize(&f, "mxfp4", &err), TD_EIO);
  assert_int_equal(f.progress.made, CK_SHARDS);
  ck_write(&f.ck);
  assert_int_equal(quantize(&f, "mxfp4", &err), TD_EIO);
  assert_int_equal(f.progress.made, CK_SHARDS);

  // What a killed run was writing goes, and nobody else's file.
  static const char *const begun[] = {"model-00001-of-00003.safetensors.done.tmp.1",
                                      "config.json.tmp.23"};
  static const char *const others[] = {"notes.tmp.1", "config.json.tmp.", "config.json.tmp.4x"};
  for (size_t i = 0; i < TD_COUNT(begun); i++)
    assert_int_equal(close(creat(out_path(&f, begun[i]), 0600)), 0);
  for (size_t i = 0; i < TD_COUNT(others); i++)
    assert_int_equal(close(creat(out_path(&f, others[i]), 0600)), 0);
  rmdir(out_path(&f, "config.json"));
  quantize_ok(&f, "mxfp4");
  assert_int_equal(f.progress.kept, CK_SHARDS);
  for (size_t i = 0; i < TD_COUNT(begun); i++)
    assert_false(there(&f, begun[i]));
  for (size_t i = 0; i < TD_COUNT(others); i++) {
    assert_true(there(&f, others[i]));
    remove(out_path(&f, others[i]));
  }
  td_model_close(open_out(&f));
  assert_int_equal(quantize(&f, "mxfp4", &err), TD_EINVAL);
  assert_non_null(strstr(err.msg, "holds a checkpoint already"));
  finish(&f);
}

static void refused(fixture *f, const char *to, td_status status, const char *says) {
  td_err err;
  td_status st = quantize(f, to, &err);
  if (st != status || !strstr(err.msg, says)) fail_msg("status %d: %s", st, err.msg);
  assert_false(there(f, "model.safetensors.index.json"));
}

TEST(refuses_what_it_cannot_make) {
  fixture f;
  start(&f);
  ck_write(&f.ck);
  refused(&f, "int4-g128", TD_EINVAL, "no linear layer that could be made int4-g128");
  int lock = open(f.out, O_RDONLY);
  assert_int_equal(flock(lock, LOCK_EX), 0);
  refused(&f, "int4-g32", TD_EAGAIN, "another process");
  close(lock);
  ck_drop(&f.ck, "model.norm.weight");
  ck_write(&f.ck);
  refused(&f, "int4-g32", TD_EFORMAT, "model.norm.weight is missing");
  finish(&f);

  start(&f);
  ck_set(&f.ck, "quantization_config",
         "{\"quant_method\": \"fp8\", \"weight_block_size\": [16, 16]}");
  ck_make_fp8(&f.ck, "model.layers.0.mlp.up_proj.weight", 16, "F32");
  ck_write(&f.ck);
  refused(&f, "fp8", TD_EINVAL, "up_proj.weight: is FP8 already");
  finish(&f);

  start(&f);
  ck_set(&f.ck, "quantization_config", "{\"quant_method\": \"mxfp4\"}");
  ck_tensor *t = ck_find(&f.ck, "model.layers.0.mlp.up_proj.weight");
  strcpy(t->dtype, "U8");
  t->shape[1] = 16;
  ck_add(&f.ck, "model.layers.0.mlp.up_proj.weight_scale", "U8", 48, 1, 0);
  ck_write(&f.ck);
  refused(&f, "int4-g32", TD_EUNSUPPORTED, "F4_E2M1 already");
  finish(&f);
}

// Whatever the length of the names and so of the header; the others are aligned to their elements.
TEST(tensors_of_whole_lines_begin_with_one) {
  for (int length = 1; length <= 64; length++) {
    char name[80];
    snprintf(name, sizeof name, "%0*d", length, 0);
    td_shard_entry entries[] = {
        {.name = "odd", .dtype = "U8", .n_dims = 1, .shape = {3}, .n_bytes = 3},
        {.name = "shape", .dtype = "I64", .n_dims = 1, .shape = {2}, .n_bytes = 16},
        {.name = name, .dtype = "U8", .n_dims = 2, .shape = {3, 64}, .n_bytes = 192},
        {.name = "few", .dtype = "F32", .n_dims = 1, .shape = {5}, .n_bytes = 20},
        {.name = "wide", .dtype = "BF16", .n_dims = 2, .shape = {2, 32}, .n_bytes = 128},
    };
    const uint64_t aligned[] = {1, 8, 64, 4, 64};
    td_buf header = TD_BUF_INIT;
    td_err err;
    assert_int_equal(td_shard_layout(entries, TD_COUNT(entries), &header, &err), TD_OK);
    uint64_t n_bytes = 0, end = 0;
    for (size_t i = 0; i < TD_COUNT(entries); i++) {
      assert_int_equal(entries[i].offset % aligned[i], 0);
      assert_true(entries[i].offset >= header.len);
      n_bytes += entries[i].n_bytes;
      if (entries[i].offset + entries[i].n_bytes > end)
        end = entries[i].offset + entries[i].n_bytes;
    }
    assert_int_equal(end, header.len + n_bytes); // without gaps
    td_buf_free(&header);
  }
}
