// src/cli/quantize_cmd.c - `tandem quantize`: progress on stderr, a table of errors on stdout.
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "cli/cli.h"
#include "model/quantize/quantize.h"
#include "runtime/command.h"

static void show_progress(void *ctx, const char *shard, size_t idx, size_t n_shards, bool kept) {
  (void)ctx;
  td_info("%s (%zu of %zu)%s", shard, idx + 1, n_shards, kept ? " is finished already" : "");
}

// All modules of one kind, e.g. "mlp.experts.up_proj", over all layers and experts.
typedef struct {
  char name[96];
  size_t n;
  double sum, worst;
  const char *worst_name;
} kind;

enum { MAX_KINDS = 64 };

// Strips what comes before "layers." (else before the last component), and the layer and expert
// numbers.
static void kind_of(const char *name, char out[96]) {
  static const char layers[] = "layers.";
  const char *at = strstr(name, layers), *dot = strrchr(name, '.');
  const char *p = at ? at + strlen(layers) : dot ? dot + 1 : name;
  size_t len = 0;
  out[0] = '\0';
  while (*p && len + 2 < 96) {
    size_t n = strcspn(p, ".");
    if (strspn(p, "0123456789") != n) {
      len += (size_t)snprintf(out + len, 96 - len, "%s%.*s", len ? "." : "", (int)n, p);
      if (len >= 96) len = 95;
    }
    p += n + (p[n] == '.');
  }
}

static size_t group(const td_quantize_report *r, kind kinds[MAX_KINDS]) {
  size_t n = 0;
  for (size_t i = 0; i < r->n_tensors; i++) {
    const td_quantized *t = &r->tensors[i];
    char name[96];
    kind_of(t->name, name);
    size_t k = 0;
    while (k < n && strcmp(kinds[k].name, name) != 0)
      k++;
    if (k == MAX_KINDS) continue;
    if (k == n) {
      kinds[n] = (kind){.worst = -1};
      snprintf(kinds[n++].name, sizeof kinds->name, "%s", name);
    }
    kinds[k].n++;
    kinds[k].sum += t->error;
    if (t->error > kinds[k].worst) {
      kinds[k].worst = t->error;
      kinds[k].worst_name = t->name;
    }
  }
  return n;
}

static td_status print_table(const td_quantize_report *r, td_err *err) {
  kind kinds[MAX_KINDS];
  size_t n = group(r, kinds);
  printf("relative RMS error\n%-32s %8s %9s %9s  %s\n", "", "matrices", "mean", "worst", "which");
  for (size_t i = 0; i < n; i++) {
    printf("%-32s %8zu %9.5f %9.5f  %s\n", kinds[i].name, kinds[i].n,
           kinds[i].sum / (double)kinds[i].n, kinds[i].worst, kinds[i].worst_name);
  }
  printf("%.3f GB became %.3f GB\n", (double)r->bytes_in * 1e-9, (double)r->bytes_out * 1e-9);
  return fflush(stdout) == 0 ? TD_OK : td_fail(err, TD_EIO, "standard output: cannot write");
}

// Prints the report file written by td_quantize.
static td_status print_json(const char *out, td_err *err) {
  char path[4096];
  td_buf text = TD_BUF_INIT;
  snprintf(path, sizeof path, "%s/quantize_report.json", out);
  td_status st = td_file_read(&text, path, (size_t)1 << 30, err);
  if (st == TD_OK && (fwrite(text.data, 1, text.len, stdout) != text.len || fflush(stdout) != 0))
    st = td_fail(err, TD_EIO, "standard output: cannot write");
  td_buf_free(&text);
  return st;
}

int td_cmd_quantize(const td_options *o) {
  td_err err;
  td_quantize_report report = {0};
  const char *names = NULL;
  const td_encoding *encoding = td_encoding_find(o->to ? o->to : "", &names);
  td_status st = td_cmd_need_model(o, &err);
  if (st == TD_OK && !o->out)
    st = td_fail(&err, TD_EINVAL, "tandem quantize needs --out DIR, where the new checkpoint goes");
  if (st == TD_OK && !encoding)
    st = td_fail(&err, TD_EINVAL, "--to %s: give one of %s", o->to ? o->to : "(nothing)", names);
  if (st == TD_OK) {
    st = td_quantize(&(td_quantize_opts){.in = o->model,
                                         .out = o->out,
                                         .encoding = encoding,
                                         .n_threads = (unsigned)o->threads,
                                         .progress = show_progress},
                     &report, &err);
  }
  if (st == TD_OK) st = o->json ? print_json(o->out, &err) : print_table(&report, &err);
  td_quantize_report_free(&report);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
