// src/bench/doctor.c - `tandem doctor`: whether this machine computes rightly, and what makes it
// slower than it could be, a line a finding with its cure.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/clock.h"
#include "base/cpus.h"
#include "base/fs.h"
#include "base/mem_info.h"
#include "base/units.h"
#include "bench/bench.h"
#include "bench/known_answers.h"
#include "bench/machine.h"
#include "bench/mem_bandwidth.h"
#include "bench/this_rig.h"
#include "runtime/command.h"
#include "runtime/gpu_probe.h"
#include "tandem/kernels.h"

typedef enum { FINE, SLOW, WRONG, ABSENT } finding;

// Counts what is slow and wrong.
typedef struct {
  const td_options *options;
  unsigned n_of[ABSENT + 1];
} doctor;

__attribute__((format(printf, 4, 5))) static void say(doctor *d, finding f, const char *what,
                                                      const char *format, ...) {
  static const char *const words[] = {"fine", "slow", "WRONG", "-"};
  va_list args;
  d->n_of[f]++;
  printf("%-6s %-14s ", words[f], what);
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  putchar('\n');
  fflush(stdout); // the next line may take seconds
}

// The first line of a small file of the kernel's; "" if there is none.
static void read_word(char word[64], const char *path) {
  td_buf text = TD_BUF_INIT;
  word[0] = '\0';
  if (td_file_read(&text, path, 1 << 16, NULL) == TD_OK)
    snprintf(word, 64, "%.*s", (int)strcspn(td_buf_text(&text), "\n"), td_buf_text(&text));
  td_buf_free(&text);
}

// ---- what the system says -----------------------------------------------------------------------

static void look_at_cpu(doctor *d, const td_machine *m) {
  const uint32_t quota = td_cgroup_cpus(NULL);
  const long n_online = sysconf(_SC_NPROCESSORS_ONLN);
  char word[64];
  say(d, strcmp(td_kernels()->isa, "scalar") ? FINE : SLOW, "CPU", "%s, %u threads, kernels %s%s",
      m->cpu, td_cpu_count(), td_kernels()->isa,
      strcmp(td_kernels()->isa, "scalar") ? "" : ": without AVX2, a tenth of the speed");
  if (td_cpu_count() < n_online) {
    say(d, SLOW, "CPUs", "%u of %ld may be used: %s", td_cpu_count(), n_online,
        quota < (uint64_t)n_online ? "the control group has a quota (docker --cpus, cpu.max)"
                                   : "the others are masked (taskset, docker --cpuset-cpus)");
  }
  read_word(word, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
  if (!strcmp(word, "powersave")) {
    char driver[64];
    read_word(driver, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver");
    if (!strstr(driver, "pstate"))
      say(d, SLOW, "clock", "the governor is powersave: cpupower frequency-set -g performance");
  }
  read_word(word, "/sys/devices/system/clocksource/clocksource0/current_clocksource");
  if (!strcmp(word, "hpet") || !strcmp(word, "acpi_pm"))
    say(d, SLOW, "time", "reading %s takes microseconds: boot with clocksource=tsc", word);
}

static void look_at_memory(doctor *d, const td_machine *m) {
  const uint64_t limit = td_cgroup_memory_limit(NULL), left = td_memory_available_bytes();
  const bool is_limited = limit < m->memory_bytes;
  say(d, is_limited ? SLOW : FINE, "memory", "%s of %s available%s", td_size((double)left).text,
      td_size((double)m->memory_bytes).text,
      is_limited ? ": a control group allows no more (docker -m, memory.max)" : "");
  const td_page_kind pages = td_memory_shared_pages(TD_HUGE_PAGE_BYTES);
  if (pages == TD_PAGES_PLAIN) {
    say(d, SLOW, "huge pages",
        "none for shared memory, so weights are read in pages of 4 KiB: echo advise > "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  } else {
    say(d, FINE, "huge pages", pages == TD_PAGES_RESERVED ? "reserved" : "transparent");
  }
  if (strstr(m->kernel, "icrosoft"))
    say(d, SLOW, "WSL",
        "Windows lets half of the memory be pinned for a GPU, and gives Linux half "
        "of it: memory= in .wslconfig");
}

static void look_at_port(doctor *d) {
  const struct sockaddr_in at = {.sin_family = AF_INET,
                                 .sin_port = htons((uint16_t)d->options->port),
                                 .sin_addr = {htonl(INADDR_LOOPBACK)}};
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (fd >= 0 && bind(fd, (const struct sockaddr *)&at, sizeof at) == 0)
    say(d, FINE, "port", "%d is free", (int)d->options->port);
  else
    say(d, ABSENT, "port", "%d: %s: tandem serve --port takes another", (int)d->options->port,
        strerror(errno));
  if (fd >= 0) close(fd);
}

// ---- what is measured ---------------------------------------------------------------------------

// Memory's rate, and whether the CPU slows down when all of it computes for two seconds.
static td_status measure_cpu(doctor *d, td_err *err) {
  td_read_speed reads = {0};
  td_peaks first, last;
  td_status st = td_read_speed_open(&reads, (unsigned)d->options->threads, err);
  if (st != TD_OK) {
    td_read_speed_close(&reads);
    return st;
  }
  const double gbps = td_read_speed_gbps(&reads), remote = td_read_speed_remote_gbps(&reads);
  char other[64] = "";
  if (remote > 0) snprintf(other, sizeof other, ", %.1f from other NUMA nodes", remote);
  say(d, FINE, "memory rate", "%.1f GB/s read by %u threads%s", gbps,
      td_thread_pool_size(reads.pool), other);
  td_peaks_measure(&first, reads.pool);
  for (const double end_s = td_clock_s() + 2; td_clock_s() < end_s;)
    td_peaks_measure(&last, reads.pool);
  if (first.fma_gflops > 0) {
    const double share = last.fma_gflops / first.fma_gflops;
    say(d, share < 0.8 ? SLOW : FINE, "arithmetic", "%.0f GFLOPS in FP32%s%.0f%s", last.fma_gflops,
        share < 0.8 ? ", after two seconds; " : ", BF16 ",
        share < 0.8 ? first.fma_gflops : last.dot_gflops,
        share < 0.8 ? " at first: too hot, or shared with others" : "");
  }
  td_read_speed_close(&reads);
  return TD_OK;
}

static void ask(doctor *d, td_dev *dev, const char *what) {
  td_buf text = TD_BUF_INIT;
  uint32_t n, n_wrong;
  td_err err;
  td_status st = td_known_answers(&text, dev, &n, &n_wrong, &err);
  if (st != TD_OK)
    say(d, WRONG, what, "%s", err.msg);
  else if (n_wrong)
    say(d, WRONG, what,
        "%u of %u known answers differ: %s%s; memory, overclocking or the driver is at fault: do "
        "not trust its texts",
        n_wrong, n, td_buf_text(&text), n_wrong > 4 ? ", ..." : "");
  else
    say(d, FINE, what, "%u known answers, in every format, are right", n);
  td_buf_free(&text);
}

// Copies from pinned memory beside what the link allows.
static void measure_link(doctor *d, td_dev *dev) {
  enum { BYTES = 64 << 20, REPEAT = 4 };
  const double allowed = td_dev_link_gbps(dev);
  void *to = NULL, *from = NULL;
  td_stream *stream = NULL;
  td_err err;
  td_status st = td_dev_alloc(dev, &to, BYTES, &err);
  if (st == TD_OK) st = td_dev_alloc_host(dev, &from, BYTES, &err);
  if (st == TD_OK) st = td_stream_open(&stream, dev, &err);
  double best_s = 0;
  for (int i = 0; i < REPEAT && st == TD_OK; i++) {
    const double start = td_clock_s();
    td_op_copy(stream, to, from, BYTES);
    st = td_stream_sync(stream, &err);
    const double seconds = td_clock_s() - start;
    if (!best_s || seconds < best_s) best_s = seconds;
  }
  if (st != TD_OK) {
    say(d, WRONG, "GPU's link", "%s", err.msg);
  } else if (allowed > 0) {
    const double gbps = BYTES / best_s * 1e-9;
    say(d, gbps < 0.7 * allowed ? SLOW : FINE, "GPU's link", "%.1f of %.1f GB/s%s", gbps, allowed,
        gbps < 0.7 * allowed ? ": fewer lanes than the slot has, a riser, or another device on it"
                             : "");
  }
  if (stream) td_stream_close(stream);
  td_dev_free_host(dev, from);
  td_dev_free(dev, to);
}

static void look_at_gpus(doctor *d) {
  td_dev_opts opts = {.kind = "cuda"};
  td_gpu_facts gpu;
  td_dev *dev;
  td_err err;
  for (; td_gpu_probe(&gpu, opts.index, 0, &err) == TD_OK; opts.index++) {
    say(d, FINE, "GPU", "%u: %s, %s free", opts.index, gpu.name,
        td_size((double)gpu.free_bytes).text);
    if (td_dev_open(&dev, &opts, &err) != TD_OK) {
      say(d, WRONG, "GPU", "%s", err.msg);
      continue;
    }
    ask(d, dev, "GPU's results");
    measure_link(d, dev);
    td_dev_close(dev);
  }
  if (!opts.index) say(d, ABSENT, "GPU", "%s", err.msg);
}

static td_status look_at_drive(doctor *d, td_err *err) {
  td_model *model;
  if (!d->options->model) return TD_OK;
  td_status st = td_model_open_shapes(&model, d->options->model, err);
  if (st != TD_OK) return st;
  const double gbps = td_rig_drive_gbps(model);
  if (gbps > 0)
    say(d, gbps < 0.5 ? SLOW : FINE, "drive", "%.2f GB/s in reads of 1 MiB of the model's files%s",
        gbps, gbps < 0.5 ? ": an NVMe drive reads 3 to 14" : "");
  td_model_close(model);
  return TD_OK;
}

int td_cmd_doctor(const td_options *o) {
  doctor d = {.options = o};
  const td_machine machine = td_machine_get();
  const td_dev_opts opts = {
      .kind = "cpu", .n_threads = (unsigned)o->threads, .activations = TD_ACTIVATIONS_AUTO};
  td_dev *dev;
  td_err err;
  td_status st = td_dev_open(&dev, &opts, &err); // chooses the kernels
  if (st != TD_OK) return td_cmd_fail(&err);
  look_at_cpu(&d, &machine);
  look_at_memory(&d, &machine);
  look_at_port(&d);
  ask(&d, dev, "CPU's results");
  td_dev_close(dev);
  st = measure_cpu(&d, &err);
  look_at_gpus(&d);
  if (st == TD_OK) st = look_at_drive(&d, &err);
  if (st != TD_OK) return td_cmd_fail(&err);
  printf("%u fine, %u slow, %u wrong\n", d.n_of[FINE], d.n_of[SLOW], d.n_of[WRONG]);
  return d.n_of[WRONG] ? 1 : 0;
}
