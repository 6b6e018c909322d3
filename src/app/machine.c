#include "app/machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/team.h"

#define BUFFER_BYTES ((size_t)1 << 30)
#define N_ROUNDS     5

enum { HUGE_PAGE_BYTES = 2 << 20 };

typedef struct {
  uint64_t *words;
  uint64_t sums[64]; // keeps the reads alive
} read_job;

static void slice_of(unsigned member, unsigned n_members, size_t *begin, size_t *end) {
  size_t n = BUFFER_BYTES / sizeof(uint64_t) / 64;
  *begin = n * member / n_members * 64;
  *end = n * (member + 1) / n_members * 64;
}

static void touch_slice(void *ctx, unsigned member, unsigned n_members) {
  read_job *job = ctx;
  size_t begin, end;
  slice_of(member, n_members, &begin, &end);
  for (size_t i = begin; i < end; i++)
    job->words[i] = i;
}

static void read_slice(void *ctx, unsigned member, unsigned n_members) {
  read_job *job = ctx;
  size_t begin, end;
  slice_of(member, n_members, &begin, &end);
  uint64_t sum[8] = {0};
  for (size_t i = begin; i < end; i += 8) {
    for (int j = 0; j < 8; j++)
      sum[j] ^= job->words[i + (size_t)j];
  }
  for (int j = 1; j < 8; j++)
    sum[0] ^= sum[j];
  job->sums[member % 64] = sum[0];
}

static td_status measure_read(td_machine *m, unsigned n_threads, td_err *err) {
  void *buffer;
  if (posix_memalign(&buffer, HUGE_PAGE_BYTES, BUFFER_BYTES) != 0) {
    return td_fail(err, TD_ENOMEM, "out of memory: no 1 GiB to measure reads with");
  }
  madvise(buffer, BUFFER_BYTES, MADV_HUGEPAGE); // the limit is memory's, not the page walker's
  read_job job = {.words = buffer};
  td_team *team;
  td_status st = td_team_open(&team, &(td_team_opts){.n_threads = n_threads}, err);
  if (st == TD_OK) {
    m->n_threads = td_team_size(team);
    td_team_run(team, touch_slice, &job);
    for (int i = 0; i < N_ROUNDS; i++) {
      double start = td_clock_s();
      td_team_run(team, read_slice, &job);
      double gbps = (double)BUFFER_BYTES / (td_clock_s() - start) * 1e-9;
      if (gbps > m->read_gbps) m->read_gbps = gbps;
    }
  }
  td_team_close(team);
  free(job.words);
  return st;
}

static void read_cpu_name(td_machine *m) {
  snprintf(m->cpu, sizeof m->cpu, "unknown");
  td_buf text = TD_BUF_INIT;
  if (td_file_read(&text, "/proc/cpuinfo", 1 << 24, NULL) == TD_OK) {
    const char *line = strstr(td_buf_text(&text), "model name");
    const char *name = line ? strchr(line, ':') : NULL;
    if (name) snprintf(m->cpu, sizeof m->cpu, "%.*s", (int)strcspn(name + 2, "\n"), name + 2);
  }
  td_buf_free(&text);
}

td_status td_machine_measure(td_machine *out, unsigned n_threads, td_err *err) {
  *out = (td_machine){0};
  read_cpu_name(out);
  struct utsname name;
  if (uname(&name) == 0) snprintf(out->kernel, sizeof out->kernel, "%.90s", name.release);
  out->memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
  return measure_read(out, n_threads, err);
}

void td_machine_json(const td_machine *machine, td_json_writer *w, const char *key) {
  td_jw_begin_object(w, key);
  td_jw_str(w, "cpu", machine->cpu);
  td_jw_str(w, "kernel", machine->kernel);
  td_jw_int(w, "threads", machine->n_threads);
  td_jw_int(w, "memory_bytes", (int64_t)machine->memory_bytes);
  td_jw_double(w, "read_gbps", machine->read_gbps);
  td_jw_end_object(w);
}
