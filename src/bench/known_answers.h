// src/bench/known_answers.h - products and row operations whose results are known, to tell a device
// that computes wrongly (memory, overclocking, driver) from one that is slow.
#pragma once

#include "base/buf.h"
#include "device/device.h"

// Matrices of every format (tandem/formats.h) times 1, 3 and 40 tokens on the device, 40 of them a
// prompt's, and, on the CPU, one head's attention and the operations on rows. Activations are small
// whole numbers, which no kernel rounds, so results are within what orders of FP32 sums explain
// (on a GPU, plus one rounding to BF16) of sums in double. Returns the number of comparisons;
// *n_wrong of them failed, and the first few are named in out, separated by commas. TD_ENOMEM, or
// what the device says.
td_status td_known_answers(td_buf *out, td_dev *dev, uint32_t *n_checked, uint32_t *n_wrong,
                           td_err *err);
