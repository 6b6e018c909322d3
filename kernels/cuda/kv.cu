// kernels/cuda/kv.cu - stores a batch's keys and values to KV pages, and gathers a sequence's into
// contiguous memory.
#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/kv_f8.cuh"

enum { KV_THREADS = 256, RUN = 8 };

__device__ static void store_element(const td_kv_view &kv, char *page, size_t at, uint16_t bits) {
  const bool is_f16 = kv.dtype == TD_F16;
  reinterpret_cast<uint16_t *>(page)[at] = is_f16 ? f16_from_f32(f32_from_bf16(bits)) : bits;
}

// The page of a token, and its position p; NULL: there is none, which the fault says.
__device__ static char *page_of(const td_kv_store_args &a, uint32_t t, uint32_t *p) {
  const td_batch_view &b = a.batch;
  int32_t position = b.position[t];
  *p = static_cast<uint32_t>(position);
  bool fits = position >= 0 && *p / b.page_tokens < b.max_pages;
  int32_t id = fits ? kv_page(b, static_cast<uint32_t>(b.seq[t]), *p) : -1;
  if (id >= 0) return a.kv.pages + static_cast<size_t>(id) * a.kv.page_bytes;
  if (threadIdx.x == 0) *b.fault = fits ? TD_CU_FAULT_PAGE : TD_CU_FAULT_POSITION;
  return nullptr;
}

// One block per token.
__global__ static void kv_store_kernel(td_kv_store_args a) {
  uint32_t t = blockIdx.x, p;
  const td_batch_view &b = a.batch;
  char *page = page_of(a, t, &p);
  if (!page) return;
  for (uint32_t i = threadIdx.x; i < a.n_heads * a.head_dim; i += blockDim.x) {
    uint32_t head = i / a.head_dim, d = i % a.head_dim;
    size_t k_at = kv_row(b, p, head, a.head_dim) + d;
    size_t v_at = kv_row(b, p, a.n_heads + head, a.head_dim) + d;
    store_element(a.kv, page, k_at, a.k[t * a.k_stride + i]);
    if (a.v) store_element(a.kv, page, v_at, a.v[t * a.v_stride + i]);
  }
}

// Block `block` of a row, by a warp; with the last one what stays in BF16.
__device__ static void store_block(const td_kv_store_args &a, char *page, size_t row,
                                   uint32_t block, const uint16_t *from) {
  enum { EACH = TD_KV_F8_BLOCK / WARP };
  uint32_t lane = threadIdx.x % WARP, d = block * TD_KV_F8_BLOCK + lane * EACH;
  char *codes = page + f8_codes_at(a.kv, row, a.head_dim);
  float v[EACH] = {}, most = 0, inverse;
  for (uint32_t i = 0; i < EACH && d < a.kv.n_codes; i++) {
    v[i] = f32_from_bf16(from[d + i]);
    most = fmaxf(most, fabsf(v[i]));
  }
  float scale = f8_scale(warp_max(most), &inverse);
  if (d < a.kv.n_codes) *reinterpret_cast<uint32_t *>(codes + d) = e4m3x4_from_f32(v, inverse);
  if (lane == 0) reinterpret_cast<float *>(page + f8_scales_at(a.kv, row))[block] = scale;
  if (block + 1 < f8_blocks(a.kv)) return;
  uint16_t *bf16 = reinterpret_cast<uint16_t *>(codes + a.kv.n_codes);
  for (uint32_t i = lane; i < a.head_dim - a.kv.n_codes; i += WARP)
    bf16[i] = from[a.kv.n_codes + i];
}

// The same in E4M3.
__global__ static void kv_store_f8_kernel(td_kv_store_args a) {
  uint32_t t = blockIdx.x, p, n_blocks = f8_blocks(a.kv);
  char *page = page_of(a, t, &p);
  if (!page) return;
  for (uint32_t i = threadIdx.x / WARP; i < (a.v ? 2 : 1) * a.n_heads * n_blocks;
       i += KV_THREADS / WARP) {
    uint32_t plane_head = i / n_blocks, head = plane_head % a.n_heads;
    const uint16_t *rows = plane_head < a.n_heads ? a.k + t * a.k_stride : a.v + t * a.v_stride;
    store_block(a, page, kv_row(a.batch, p, plane_head, 1), i % n_blocks, rows + head * a.head_dim);
  }
}

extern "C" int td_cu_kv_store(const td_kv_store_args *a, td_cu_stream stream) {
  auto kernel = a->kv.dtype == TD_F8E4M3 ? kv_store_f8_kernel : kv_store_kernel;
  return TD_LAUNCH(kernel, a->batch.n_tokens, KV_THREADS, 0, stream, *a);
}

// One thread per run of eight elements, of head blockIdx.y. blockIdx.z: sequence within a plane,
// planes one after the other.
template <bool IS_F8> __global__ static void kv_gather_kernel(td_cu_kv_gather_args a) {
  uint32_t n_runs = (a.dim + RUN - 1) / RUN, run = blockIdx.x * KV_THREADS + threadIdx.x;
  uint32_t slot = run / n_runs, d = run % n_runs * RUN, head = a.head0 + blockIdx.y;
  const auto &place = a.list.seqs[blockIdx.z % a.list.n_seqs];
  uint32_t plane = blockIdx.z / a.list.n_seqs;
  uint32_t position = place.first + slot;
  uint32_t end = static_cast<uint32_t>(a.batch.q_begin[place.seq + 1]);
  bool any = end > static_cast<uint32_t>(a.batch.q_begin[place.seq]);
  if (slot >= place.n_keys || !any || position >= keys_of(a.batch, end - 1)) return;
  int32_t id = kv_page(a.batch, place.seq, position);
  if (id < 0) return;
  const char *page = kv_page_at(a.kv, id);
  uint32_t plane_head = plane * a.n_kv_heads + head;
  size_t from = kv_row(a.batch, position, plane_head, a.dim) + d;
  size_t before = static_cast<size_t>(plane) * gridDim.y + blockIdx.y; // heads before this one
  uint16_t *to = a.out + ((before * a.list.n_keys + place.key_begin) * n_runs + run) * RUN;
  if constexpr (IS_F8) {
    size_t row = kv_row(a.batch, position, plane_head, 1);
    auto scales = reinterpret_cast<const float *>(page + f8_scales_at(a.kv, row));
    put_run(to, f8_run(a.kv, page + f8_codes_at(a.kv, row, a.dim), scales, d));
    return;
  }
  if (a.in_runs) {
    put_run(to, kv_bf16x8(a.kv, page, from));
    return;
  }
  for (uint32_t i = 0; i < RUN; i++)
    to[i] = d + i < a.dim ? kv_bf16(a.kv, page, from + i) : 0;
}

extern "C" int td_cu_kv_gather(const td_cu_kv_gather_args *a, td_cu_stream stream) {
  td_cu_kv_gather_args args = *a;
  uintptr_t places = reinterpret_cast<uintptr_t>(a->kv.pages) | a->kv.page_bytes;
  args.in_runs = a->dim % RUN == 0 && places % sizeof(uint4) == 0;
  uint32_t n_runs = ceil_div(a->dim, RUN);
  dim3 grid(ceil_div(static_cast<size_t>(a->list.max_keys) * n_runs, KV_THREADS), a->n_heads,
            a->n_planes * a->list.n_seqs);
  auto kernel = a->kv.dtype == TD_F8E4M3 ? kv_gather_kernel<true> : kv_gather_kernel<false>;
  return TD_LAUNCH(kernel, grid, KV_THREADS, 0, stream, args);
}
