// src/device/cpu/op_trace.c - trace spans of operators.
#include "base/trace.h"
#include "device/cpu/cpu.h"

static const td_trace_event traced_as[TD_N_OPS] = {
#define X(NAME, ...) [TD_OP_##NAME] = TD_TRACE_OP_##NAME,
    TD_OPS(X)
#undef X
};

typedef struct {
  uint32_t n_tokens;
  uint64_t amount;
} op_size;

static op_size size_of(const td_op *op) {
  switch (op->kind) {
#define X(NAME, name, args_type, unit, n_tokens, amount_unit, amount)                              \
  case TD_OP_##NAME: {                                                                             \
    const args_type *a = &op->name;                                                                \
    (void)a;                                                                                       \
    return (op_size){n_tokens, amount};                                                            \
  }
    TD_OPS(X)
#undef X
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
