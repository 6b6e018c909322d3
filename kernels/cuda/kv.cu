// kernels/cuda/kv.cu - stores a batch's keys and values to KV pages, and gathers a sequence's into
// contiguous memory.
#include "kernels/cuda/attn.cuh"

enum { KV_THREADS = 256, RUN = 8 };

__device__ static void store_element(const td_cu_kv &kv, char *page, size_t at, uint16_t bits) {
  reinterpret_cast<uint16_t *>(page)[at] = kv.f16 ? f16_from_f32(f32_from_bf16(bits)) : bits;
}

// One block per token.
__global__ static void kv_store_kernel(td_cu_kv_store_args a) {
  uint32_t t = blockIdx.x;
  const td_cu_batch &b = a.batch;
  int32_t position = b.position[t];
  uint32_t p = static_cast<uint32_t>(position);
  bool fits = position >= 0 && p / b.page_tokens < b.max_pages;
  int32_t id = fits ? kv_page(b, static_cast<uint32_t>(b.seq[t]), p) : -1;
  if (id < 0) {
    if (threadIdx.x == 0) *a.fault = fits ? TD_CU_FAULT_PAGE : TD_CU_FAULT_POSITION;
    return;
  }
  char *page = a.kv.pages + static_cast<size_t>(id) * a.kv.page_bytes;
  for (uint32_t i = threadIdx.x; i < a.n_heads * a.head_dim; i += blockDim.x) {
    uint32_t head = i / a.head_dim, d = i % a.head_dim;
    size_t k_at = kv_row(b, p, head, a.head_dim) + d;
    size_t v_at = kv_row(b, p, a.n_heads + head, a.head_dim) + d;
    store_element(a.kv, page, k_at, a.k[t * a.k_stride + i]);
    if (a.v) store_element(a.kv, page, v_at, a.v[t * a.v_stride + i]);
  }
}

extern "C" int td_cu_kv_store(const td_cu_kv_store_args *a, td_cu_stream stream) {
  TD_LAUNCH(kv_store_kernel, a->batch.n_tokens, KV_THREADS, 0, stream, *a);
  return launched();
}

// One thread per run of eight elements, of head blockIdx.y. blockIdx.z: sequence within a plane,
// planes one after the other.
__global__ static void kv_gather_kernel(td_cu_kv_gather_args a) {
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
  size_t from = kv_row(a.batch, position, plane * a.n_kv_heads + head, a.dim) + d;
  size_t before = static_cast<size_t>(plane) * gridDim.y + blockIdx.y; // heads before this one
  uint16_t *to = a.out + ((before * a.list.n_keys + place.key_begin) * n_runs + run) * RUN;
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
  TD_LAUNCH(kv_gather_kernel, grid, KV_THREADS, 0, stream, args);
  return launched();
}
