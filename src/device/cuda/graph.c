// src/device/cuda/graph.c - CUDA graphs of repeated work.
// A key's first work is queued normally, which copies weights and grows scratch memory. The second
// is captured, and from then on the graph is launched. Work that cannot be captured is queued
// normally.
#include <stdlib.h>

#include "base/log.h"
#include "device/cuda/cuda.h"

static bool is_same(const td_work_key *a, const td_work_key *b) {
#define X(field)                                                                                   \
  if (a->field != b->field) return false;
  TD_WORK_KEY_FIELDS(X)
#undef X
  return true;
}

static td_cuda_graph *find(td_cuda_stream *stream, const td_work_key *key) {
  for (uint32_t i = 0; i < N_CUDA_GRAPHS; i++) {
    td_cuda_graph *g = &stream->graphs[i];
    if (g->is_used && is_same(&g->key, key)) return g;
  }
  return NULL;
}

static void drop(td_cuda_stream *stream, td_cuda_graph *g) {
  if (g->graph) td_cuda_dev_of(stream)->abi->graph_close(g->graph);
  *g = (td_cuda_graph){.is_used = false};
}

void td_cuda_graphs_drop(td_cuda_stream *stream) {
  for (uint32_t i = 0; i < N_CUDA_GRAPHS; i++)
    drop(stream, &stream->graphs[i]);
}

static bool is_refused(const td_cuda_stream *stream) {
  return stream->n_refused >= N_CAPTURES_REFUSED;
}

// Stores a new key in place of the oldest one.
static void remember(td_cuda_stream *stream, const td_work_key *key) {
  td_cuda_graph *g = &stream->graphs[stream->next_graph];
  stream->next_graph = (stream->next_graph + 1) % N_CUDA_GRAPHS;
  drop(stream, g);
  *g = (td_cuda_graph){.is_used = true, .key = *key};
}

static bool has_graphs(const td_cuda_stream *stream) {
  for (uint32_t i = 0; i < N_CUDA_GRAPHS; i++)
    if (stream->graphs[i].graph) return true;
  return false;
}

// After a failure that may be temporary, such as memory that grew meanwhile, the next run captures
// again, up to N_CAPTURES_REFUSED times. Out of memory for another graph: the existing graphs are
// dropped, if there are any.
static void note_refusal(td_cuda_stream *stream, td_cuda_graph *g, int code) {
  const bool is_full = stream->err.code == TD_OK && code == CUDA_OUT_OF_MEMORY &&
                       has_graphs(stream);
  const char *why = stream->err.code == TD_OK ? td_cuda_dev_of(stream)->abi->error_text(code)
                                              : stream->err.msg;
  if (is_full) {
    td_debug("%s: graphs make room for others: %s", stream->base.dev->name, why);
    td_cuda_graphs_drop(stream);
  } else if (++stream->n_refused < N_CAPTURES_REFUSED) {
    td_info("%s: work could not be made a graph: %s", stream->base.dev->name, why);
    drop(stream, g);
  } else {
    td_warn("%s: steps are launched without graphs from now on, which is slower, after %u failures "
            "in a row: %s",
            stream->base.dev->name, stream->n_refused, why);
    td_cuda_graphs_drop(stream);
  }
  stream->err.code = TD_OK;
}

// During capture nothing runs, so a failed capture has no other effects.
static bool capture(td_cuda_stream *stream, td_cuda_graph *g, void (*enqueue)(void *ctx),
                    void *ctx) {
  const td_cu_abi *abi = td_cuda_dev_of(stream)->abi;
  int code = abi->capture_begin(stream->cu);
  if (code == 0) {
    stream->is_capturing = true;
    enqueue(ctx);
    stream->is_capturing = false;
    code = abi->capture_end(stream->cu, &g->graph);
  }
  if (code == 0 && stream->err.code == TD_OK) {
    stream->n_refused = 0;
    return true;
  }
  note_refusal(stream, g, code);
  return false;
}

void td_cuda_stream_run(td_stream *base, const td_work_key *key, void (*enqueue)(void *ctx),
                        void *ctx) {
  td_cuda_stream *stream = (td_cuda_stream *)base;
  if (stream->n_drops != td_cuda_dev_of(stream)->n_drops) td_cuda_graphs_drop(stream);
  stream->n_drops = td_cuda_dev_of(stream)->n_drops;
  td_cuda_graph *g = is_refused(stream) ? NULL : find(stream, key);
  if (stream->err.code != TD_OK) return;
  td_cuda_use(td_cuda_dev_of(stream));
  if (!g || (!g->graph && !capture(stream, g, enqueue, ctx))) {
    if (!is_refused(stream)) remember(stream, key);
    enqueue(ctx);
    return;
  }
  const td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_cuda_result(dev, dev->abi->graph_launch(g->graph, stream->cu), "a graph", &stream->err);
}
