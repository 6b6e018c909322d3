// src/device/check.h - checks of operator arguments that all devices share.
#pragma once

#include "device/device_impl.h"

#define TD_DEV_REQUIRE(cond, ...)                                                                  \
  do {                                                                                             \
    if (!(cond)) return td_fail(err, TD_EINVAL, __VA_ARGS__);                                      \
  } while (0)

// TD_EINVAL unless the matrix description is consistent. what is the matrix's name in the message.
td_status td_dev_check_weight(const td_weight *w, const char *what, td_err *err);
// TD_EINVAL unless v has n elements.
td_status td_dev_check_vec(const td_vec *v, uint32_t n, const char *what, td_err *err);
td_status td_dev_check_rmsnorm(const td_rmsnorm_args *a, td_err *err);
td_status td_dev_check_linear(const td_linear_op_args *a, td_err *err);
td_status td_dev_check_router(const td_router_args *a, td_err *err);
td_status td_dev_check_attn_mla(const td_attn_mla_args *a, td_err *err);
td_status td_dev_check_select(const td_select_args *a, td_err *err);
// Entries of dim elements, at `at` elements of a page's state. group 0: none.
td_status td_dev_check_pool(const td_kv_view *state, const td_batch_view *b, uint32_t group,
                            size_t at, size_t dim, td_err *err);
// rows: of a token in a page; n 0: there are none.
td_status td_dev_check_batch(const td_batch_view *batch, const td_kv_view *kv, td_dtype act_dtype,
                             td_kv_rows rows, td_err *err);
td_status td_dev_check_delta(const td_kv_view *state, const td_delta_shape *shape, td_err *err);
