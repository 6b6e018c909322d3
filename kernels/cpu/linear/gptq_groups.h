// kernels/cpu/linear/gptq_groups.h - GPTQ by linear_kmajor.h, except where groups begin inside a
// word.
static void linear_gptq(const td_linear_args *args) {
  if (args->w->scale_cols % 8 == 0 || args->w->scale_cols >= args->w->cols) {
    linear_kmajor(args);
  } else {
    linear_i4_gptq__scalar(args);
  }
}
