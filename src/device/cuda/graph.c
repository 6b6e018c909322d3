// src/device/cuda/graph.c - work that comes again and again, launched as one piece. A key's first
// work is queued as it is, which copies weights and grows scratch memory; its second is captured,
// and from then on the graph is launched. What cannot be captured is queued as it is.
#include <stdlib.h>

#include "base/log.h"
#include "device/cuda/cuda.h"

static td_cuda_graph *find(td_cuda_stream *stream, uint64_t key) {
  for (uint32_t i = 0; i < N_CUDA_GRAPHS; i++) {
    td_cuda_graph *g = &stream->graphs[i];
    if (g->is_used && g->key == key) return g;
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

// A place for a new key: the oldest one's.
static void remember(td_cuda_stream *stream, uint64_t key) {
  td_cuda_graph *g = &stream->graphs[stream->next_graph];
  stream->next_graph = (stream->next_graph + 1) % N_CUDA_GRAPHS;
  drop(stream, g);
  *g = (td_cuda_graph){.is_used = true, .key = key};
}

// While a stream is captured nothing runs, so a failure leaves nothing behind but itself.
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
  if (code == 0 && stream->err.code == TD_OK) return true;
  // Without memory for one more graph, those that are there make room for others.
  stream->is_capture_refused = stream->err.code != TD_OK || code != CUDA_OUT_OF_MEMORY;
  td_info("%s: work is not launched as a graph: %s", stream->base.dev->name,
          stream->err.code == TD_OK ? abi->error_text(code) : stream->err.msg);
  td_cuda_graphs_drop(stream);
  stream->err.code = TD_OK;
  return false;
}

void td_cuda_stream_run(td_stream *base, uint64_t key, void (*enqueue)(void *ctx), void *ctx) {
  td_cuda_stream *stream = (td_cuda_stream *)base;
  td_cuda_graph *g = stream->is_capture_refused ? NULL : find(stream, key);
  if (stream->err.code != TD_OK) return;
  td_cuda_use(td_cuda_dev_of(stream));
  if (!g || (!g->graph && !capture(stream, g, enqueue, ctx))) {
    if (!stream->is_capture_refused) remember(stream, key);
    enqueue(ctx);
    return;
  }
  const td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_cuda_result(dev, dev->abi->graph_launch(g->graph, stream->cu), "a graph", &stream->err);
}
