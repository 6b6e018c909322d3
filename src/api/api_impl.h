// src/api/api_impl.h - declarations shared by the files that parse requests.
#pragma once

#include "api/request.h"
#include "base/json_parse.h"
#include "base/json_write.h"

// Read one member and check its range. When the member is absent, *out is left unchanged.
td_status td_api_get_int(const cJSON *object, const char *key, int64_t min, int64_t max,
                         int64_t *out, td_api_error *error);
td_status td_api_get_float(const cJSON *object, const char *key, double min, double max, float *out,
                           td_api_error *error);

// Path of a value in the body, for error messages: messages[2].content[0].text. where is "" for the
// body itself.
typedef struct {
  char text[TD_API_PARAM_BYTES];
} td_api_path;
td_api_path td_api_member(const char *where, const char *key);
td_api_path td_api_item(const char *where, unsigned i);
// Of an object whose path in the body is `where`. *out borrows from it.
td_status td_api_get_str_at(const cJSON *object, const char *key, const char *where,
                            const char **out, td_api_error *error);
td_status td_api_get_bool_at(const cJSON *object, const char *key, const char *where, bool *out,
                             td_api_error *error);
#define td_api_get_str(root, key, out, error)  td_api_get_str_at(root, key, "", out, error)
#define td_api_get_bool(root, key, out, error) td_api_get_bool_at(root, key, "", out, error)

// Copies text; the request owns the copy.
td_status td_api_copy(char **out, const char *text, td_api_error *error);

// Parses a body, which must be an object; escapes that stand for no character are replaced.
td_status td_api_parse_root(cJSON **root, const char *body, size_t len, td_api_error *error);

// sampling.c: temperature, top_p and the other sampling parameters, seed, logit_bias, stop.
td_status td_api_parse_sampling(td_api_request *out, const cJSON *root,
                                const td_api_defaults *defaults, td_api_error *error);

// messages.c: writes messages, tools and template options to vars and plain_vars.
td_status td_api_parse_messages(td_api_request *out, const cJSON *root, td_api_error *error);
// Writes a value exactly as it was parsed: numbers keep their spelling, and the first of several
// equal keys is kept.
void td_api_write_json(td_json_writer *w, const char *key, const cJSON *value);

// thinking.c: writes what the request says of thinking as variables of a template.
td_status td_api_write_thinking(td_json_writer *w, const cJSON *root, td_api_error *error);

// parts.c: appends the text of content, a string or parts, which are joined with line feeds. A part
// without text, such as an image, leaves a note in its place or, if is_asked, is an error that
// names it by `where`.
td_status td_api_add_parts(td_buf *out, const cJSON *content, bool is_asked, const char *where,
                           td_api_error *error);
// The same for one part, whose path where is.
td_status td_api_add_part(td_buf *out, const cJSON *part, bool is_asked, const char *where,
                          td_api_error *error);
// What a message says, while it is gathered. Zeroed is empty.
typedef struct {
  td_buf text;             // behind the last image
  td_buf parts;            // what is before, comma-separated; empty: there is no image
  bool sees;               // images are shown to the model, not noted
  td_api_request *request; // keeps the images; NULL: they stay parts as they are
  unsigned n_parts;        // in parts
  // Gets a line of the path that each image's part will have, in a message of this path, and of
  // that which it is from. NULL: nobody asks.
  td_buf *origins;
  td_api_path message;
} td_api_content;
// td_api_add_parts and td_api_add_part where the model may see: it sees what users and tools send.
td_status td_api_add_content(td_api_content *out, const cJSON *content, bool is_asked,
                             const char *where, td_api_error *error);
td_status td_api_add_shown_part(td_api_content *out, const cJSON *part, bool is_asked,
                                const char *where, td_api_error *error);
// Writes the member "content", a string or an array of parts, and frees c.
void td_api_write_content(td_json_writer *w, td_api_content *c);
void td_api_content_free(td_api_content *c);
// Appends the note of something of a type that has no text, on a line of its own.
void td_api_add_omitted(td_buf *out, const char *type);
// The message whose own content the user has just sent: the last one's, if that is the user's; what
// the system says behind it does not count. NULL: none.
const cJSON *td_api_asked(const cJSON *messages);

// tools.c: checks tools and tool_choice. *tools is NULL when the template must not get any tools.
td_status td_api_check_tools(const cJSON *root, const cJSON **tools, td_api_error *error);
// What tool_choice and strict tools ask of generated calls, after td_api_check_tools.
td_status td_api_parse_calls(td_api_request *out, const cJSON *root, td_api_error *error);

// constraint.c: response_format and what other servers call guided decoding or structured output.
td_status td_api_parse_constraint(td_api_request *out, const cJSON *root, td_api_error *error);
// Reports an error for members that other servers support and this one does not, instead of
// ignoring them.
td_status td_api_refuse_unsupported(const cJSON *root, td_api_error *error);

// The grammar that the request's constraints are put together in. NULL: out of memory, and error
// says so.
td_grammar_build *td_api_build(td_api_request *out, td_api_error *error);

// call_values.c: sets the tool's parameters from their schema (NULL: any).
td_status td_api_add_params(td_api_request *out, td_api_tool *tool, const cJSON *root,
                            td_api_error *error);
void td_api_tool_free(td_api_tool *tool);

// The prompt of /v1/completions, or the tokens of /detokenize.
td_status td_api_parse_prompt(td_api_request *out, const cJSON *root, const char *key,
                              const td_api_defaults *defaults, td_api_error *error);
