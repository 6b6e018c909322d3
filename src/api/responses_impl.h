// src/api/responses_impl.h - the two halves of OpenAI's Responses.
#ifndef TD_API_RESPONSES_IMPL_H
#define TD_API_RESPONSES_IMPL_H

#include "api/dialect_impl.h"

td_status td_responses_translate(td_buf *out, const cJSON *root, td_dialect_state *state,
                                 td_api_error *error);

#endif
