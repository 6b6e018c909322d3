// src/device/cpu/tile_map.c - runs of tiles between the borders of stripes.
#include "device/cpu/tile_map.h"

static td_cpu_rows rows_of(const td_tile_map_opts *o, size_t part, size_t matrix) {
  return o->rows ? o->rows(o->ctx, part, matrix) : (td_cpu_rows){.base = NULL};
}

size_t td_tile_map_max_runs(const td_tile_map_opts *o) {
  size_t most = 0;
  for (size_t p = 0; p < o->n_parts; p++) {
    const td_cpu_part *part = &o->parts[p];
    const size_t n_bytes = part->n_matrices ? rows_of(o, p, 0).n_bytes : 0;
    const size_t n_stripes = o->stripes->base ? n_bytes / o->stripes->stripe_bytes + 2 : 0;
    const size_t n = n_stripes > o->n_nodes ? n_stripes : o->n_nodes;
    most += part->n_matrices * (n < part->n_tiles ? n : part->n_tiles);
  }
  return most;
}

// The first tile whose middle is at offset or behind, as counted from the matrix's first byte.
static size_t tile_at(const td_cpu_rows *rows, size_t n_tiles, size_t offset) {
  const size_t half = rows->tile_bytes / 2;
  const size_t tile = offset > half ? (offset - half + rows->tile_bytes - 1) / rows->tile_bytes : 0;
  return tile < n_tiles ? tile : n_tiles;
}

typedef struct {
  td_tile_map *map;
  const td_tile_map_opts *opts;
  size_t part, n_runs;
  unsigned node;
} making;

static void add_run(making *m, size_t first, size_t begin, size_t end) {
  if (begin >= end) return;
  size_t *n_items = &m->map->of[m->part][m->node].n_items;
  m->map->runs[m->n_runs++] = (td_tile_run){.first = first + begin, .n = end - begin, *n_items};
  *n_items += end - begin;
}

// The node's tiles of a matrix, whose items begin with `first`.
static void add_matrix(making *m, const td_cpu_rows *rows, size_t n_tiles, size_t first) {
  const td_stripes *s = m->opts->stripes;
  const unsigned n_nodes = m->opts->n_nodes;
  if (!rows->base || s->n_nodes != n_nodes || !td_stripes_hold(s, rows->base, rows->n_bytes)) {
    add_run(m, first, td_node_begin(n_tiles, n_nodes, m->node),
            td_node_begin(n_tiles, n_nodes, m->node + 1));
    return;
  }
  const size_t base = (size_t)(rows->base - s->base), of_first = base / s->stripe_bytes;
  const size_t skipped = (m->node + n_nodes - of_first % n_nodes) % n_nodes;
  for (size_t i = of_first + skipped;; i += n_nodes) {
    const size_t begin = i * s->stripe_bytes, end = begin + s->stripe_bytes;
    if (begin >= base + rows->n_bytes) return;
    const size_t last = end >= base + rows->n_bytes ? n_tiles : tile_at(rows, n_tiles, end - base);
    add_run(m, first, begin > base ? tile_at(rows, n_tiles, begin - base) : 0, last);
  }
}

void td_tile_map_make(td_tile_map *out, td_tile_run *runs, const td_tile_map_opts *o) {
  making m = {.map = out, .opts = o};
  size_t first_of_part = 0;
  *out = (td_tile_map){.runs = runs};
  for (m.part = 0; m.part < o->n_parts; m.part++) {
    const td_cpu_part *part = &o->parts[m.part];
    for (m.node = 0; m.node < o->n_nodes; m.node++) {
      out->of[m.part][m.node].first_run = m.n_runs;
      for (size_t i = 0; i < part->n_matrices && part->n_tiles; i++) {
        const td_cpu_rows rows = rows_of(o, m.part, i);
        add_matrix(&m, &rows, part->n_tiles, first_of_part + i * part->n_tiles);
      }
      out->of[m.part][m.node].n_runs = m.n_runs - out->of[m.part][m.node].first_run;
    }
    first_of_part += part->n_matrices * part->n_tiles;
  }
}

size_t td_tile_map_item(const td_tile_map *map, size_t part, unsigned node, size_t i) {
  const td_tile_run *runs = map->runs + map->of[part][node].first_run;
  size_t low = 0, high = map->of[part][node].n_runs;
  while (high - low > 1) {
    const size_t mid = (low + high) / 2;
    *(runs[mid].before <= i ? &low : &high) = mid;
  }
  return runs[low].first + (i - runs[low].before);
}
