// kernels/cuda/repack.cu - repacks AWQ and GPTQ layouts of 4-bit weights to rows, once: the same
// codes, scales and zero points, arranged so that a lane can load eight weights of a row at a time.
#include "kernels/cuda/dequant.cuh"

enum { THREADS = 256 };

// Thread i writes word i of the codes, scale i and word i of the zero points, where they exist.
// Rows vary fastest, as in the source, so that loads coalesce.
__global__ static void as_rows_kernel(td_cu_as_rows_args a) {
  const td_weight &w = a.w;
  size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
  uint32_t groups = weight_groups(w), words = (w.cols + 7) / 8;
  uint32_t row = static_cast<uint32_t>(i % w.rows), column = static_cast<uint32_t>(i / w.rows);
  if (column < words) {
    uint32_t word = 0;
    for (uint32_t c = 0; c < 8 && column * 8 + c < w.cols; c++)
      word |= code4_at(w, row, column * 8 + c) << 4 * c;
    a.data[static_cast<size_t>(row) * words + column] = word;
  }
  if (column < groups) {
    size_t to = static_cast<size_t>(row) * groups + column;
    if (w.scale_dtype == TD_F32) {
      static_cast<uint32_t *>(a.scale)[to] = static_cast<const uint32_t *>(w.scale)[i];
    } else {
      static_cast<uint16_t *>(a.scale)[to] = static_cast<const uint16_t *>(w.scale)[i];
    }
  }
  uint32_t octets = (w.rows + 7) / 8, octet = static_cast<uint32_t>(i % octets);
  uint32_t group = static_cast<uint32_t>(i / octets);
  if (w.zero && group < groups) {
    uint32_t word = 0;
    for (uint32_t r = octet * 8; r < octet * 8 + 8 && r < w.rows; r++)
      word |= static_cast<uint32_t>(zero_at(w, r, group)) << r % 8 * 4;
    a.zero[static_cast<size_t>(octet) * groups + group] = word;
  }
}

extern "C" int td_cu_as_rows(const td_cu_as_rows_args *a, td_cu_stream stream) {
  size_t words = (static_cast<size_t>(a->w.cols) + 7) / 8, groups = td_weight_groups(&a->w);
  size_t n = a->w.rows * (words > groups ? words : groups);
  TD_LAUNCH(as_rows_kernel, dim3(ceil_div(n, THREADS)), THREADS, 0, stream, *a);
  return launched();
}
