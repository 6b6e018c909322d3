// src/bench/machine.c - reads CPU model, kernel version and memory size.
#include "bench/machine.h"

#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/fs.h"

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

td_machine td_machine_get(void) {
  td_machine m = {0};
  read_cpu_name(&m);
  struct utsname name;
  if (uname(&name) == 0) snprintf(m.kernel, sizeof m.kernel, "%.90s", name.release);
  m.memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
  return m;
}

void td_machine_json(const td_machine *machine, td_json_writer *w) {
  td_jw_add(w,
            "'machine': {'cpu': %s, 'kernel': %s, 'threads': %u, 'memory_bytes': %lu, "
            "'read_gbps': %g}",
            machine->cpu, machine->kernel, machine->n_threads, machine->memory_bytes,
            machine->read_gbps);
}
