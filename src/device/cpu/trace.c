// src/device/cpu/trace.c - trace spans of operators.
#include "base/trace.h"
#include "device/cpu/cpu.h"

static const td_trace_event traced_as[TD_N_OPS] = {
#define X(NAME, name, args_type) [TD_OP_##NAME] = TD_TRACE_OP_##NAME,
    TD_DEVICE_OPS(X)
#undef X
};

typedef struct {
  uint32_t n_tokens;
  uint64_t amount; // in the unit given by base/trace.h
} op_size;

static op_size size_of(const td_op *op) {
  switch (op->kind) {
  case TD_OP_EMBED: return (op_size){op->embed.n_tokens, 0};
  case TD_OP_RMSNORM: return (op_size){op->rmsnorm.n_rows, 0};
  case TD_OP_LINEAR: return (op_size){op->linear.n_tokens, td_weight_data_bytes(op->linear.w)};
  case TD_OP_SCALE_ROWS: return (op_size){op->scale_rows.n_tokens, 0};
  case TD_OP_ROPE: return (op_size){op->rope.n_tokens, 0};
  case TD_OP_KV_STORE_GQA: return (op_size){op->kv_store_gqa.batch.n_tokens, 0};
  case TD_OP_KV_STORE_MLA: return (op_size){op->kv_store_mla.batch.n_tokens, 0};
  case TD_OP_ATTN_GQA: return (op_size){op->attn_gqa.batch.n_tokens, 0};
  case TD_OP_ATTN_MLA: return (op_size){op->attn_mla.batch.n_tokens, 0};
  case TD_OP_TOP_LOGITS: return (op_size){op->top_logits.n_rows, 0};
  case TD_OP_ROUTER: return (op_size){op->router.n_tokens, 0};
  case TD_OP_MOE: return (op_size){op->moe.n_tokens, 0};
  case TD_OP_COPY: return (op_size){0, op->copy.n_bytes};
  case TD_OP_FILL_ZERO: return (op_size){0, op->fill_zero.n_bytes};
  case TD_OP_ADD: return (op_size){0, op->add.n};
  case TD_OP_GATHER_ROWS: return (op_size){op->gather_rows.n_rows, 0};
  case TD_OP_SUM_PARTS: return (op_size){0, op->sum_parts.n};
  case TD_OP_SIGNAL:
  case TD_OP_AWAIT:
  case TD_N_OPS: break;
  }
  return (op_size){0, 0};
}

td_status td_cpu_execute_traced(td_cpu_stream *stream, const td_op *op, td_err *err) {
  uint64_t begin_ns = td_trace_begin();
  td_status st = td_cpu_execute(stream, op, err);
  if (begin_ns && st == TD_OK && op->kind < TD_N_OPS) {
    op_size size = size_of(op);
    td_trace_span(begin_ns, traced_as[op->kind], size.n_tokens, size.amount);
  }
  return st;
}
