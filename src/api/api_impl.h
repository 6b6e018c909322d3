// src/api/api_impl.h - what the files that parse requests share.
#ifndef TD_API_API_IMPL_H
#define TD_API_API_IMPL_H

#include "api/request.h"
#include "base/json_parse.h"
#include "base/json_write.h"

// Members with their ranges; each leaves *out alone when the member is absent.
td_status td_api_get_bool(const cJSON *object, const char *key, bool *out, td_api_error *error);
td_status td_api_get_int(const cJSON *object, const char *key, int64_t min, int64_t max,
                         int64_t *out, td_api_error *error);
td_status td_api_get_float(const cJSON *object, const char *key, double min, double max, float *out,
                           td_api_error *error);
// *out borrows from object.
td_status td_api_get_str(const cJSON *object, const char *key, const char **out,
                         td_api_error *error);

// Where a value stands in the body: messages[2].content[0].text.
typedef struct {
  char text[TD_API_PARAM_BYTES];
} td_api_path;
td_api_path td_api_member(const char *where, const char *key);
td_api_path td_api_item(const char *where, unsigned i);
// td_api_get_str and td_api_get_bool of an object that stands at where.
td_status td_api_get_str_at(const cJSON *object, const char *key, const char *where,
                            const char **out, td_api_error *error);
td_status td_api_get_bool_at(const cJSON *object, const char *key, const char *where, bool *out,
                             td_api_error *error);

// A copy for the request to own.
td_status td_api_copy(char **out, const char *text, td_api_error *error);

// sampling.c: temperature and its kin, seed, logit_bias, stop.
td_status td_api_parse_sampling(td_api_request *out, const cJSON *root,
                                const td_api_defaults *defaults, td_api_error *error);

// messages.c: messages, tools and template options into vars and plain_vars.
td_status td_api_parse_messages(td_api_request *out, const cJSON *root, td_api_error *error);
// Writes a value as it was read: numbers keep their text, of equal keys the first stays.
void td_api_write_json(td_json_writer *w, const char *key, const cJSON *value);

// tools.c: checks tools, tool_choice and response_format. *tools is NULL when the template should
// not see any.
td_status td_api_check_tools(const cJSON *root, const cJSON **tools, td_api_error *error);
td_status td_api_check_format(const cJSON *root, td_api_error *error);
// Members that other servers obey and this one does not are an error rather than ignored.
td_status td_api_refuse_unsupported(const cJSON *root, td_api_error *error);

// prompt.c: prompt of completions, tokens of /detokenize.
td_status td_api_parse_prompt(td_api_request *out, const cJSON *root, const char *key,
                              const td_api_defaults *defaults, td_api_error *error);

#endif
