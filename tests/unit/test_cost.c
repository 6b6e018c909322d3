// tests/unit/test_cost.c - no input is dear: of what a client may send, and of what a model may
// write, twice as much takes at most MAX_GROWTH times the steps, and no shape of it a deep stack.
// CTest: no-asan no-tsan
#include <stdlib.h>

#include "unit/cost_steps.h"

#include "api/api_impl.h"
#include "api/dialects/dialect.h"
#include "api/turn.h"
#include "base/json_parse.h"

// ---- JSON ---------------------------------------------------------------------------------------

static td_status run_json(void *arg) {
  input *in = arg;
  cJSON *root;
  td_err err;
  td_buf out = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&out);
  td_status st = td_json_parse(&root, td_buf_text(&in->text), in->text.len, TD_JSON_MAX_DEPTH,
                               &err);
  if (st == TD_OK) td_api_write_json(&w, NULL, root);
  cJSON_Delete(root);
  td_buf_free(&out);
  return st;
}

static td_status run_names(void *arg) {
  input *in = arg;
  cJSON *root;
  td_err err;
  td_json_names names;
  td_status st = td_json_parse(&root, td_buf_text(&in->text), in->text.len, TD_JSON_MAX_DEPTH,
                               &err);
  TD_CHECK(st == TD_OK && td_json_names_open(&names, root, NULL));
  for (const cJSON *item = root->child; item; item = item->next)
    TD_CHECK(td_json_names_has(&names, item->valuestring));
  td_json_names_close(&names);
  cJSON_Delete(root);
  return st;
}

#define ALIKE "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

TEST(json) {
  static const shape shapes[] = {
      {"arrays in arrays", run_json, 0, "<*[*>", 10000, TD_EFORMAT},
      {"objects in objects", run_json, 0, "<*{~a~:*>", 10000, TD_EFORMAT},
      {"values", run_json, 0, "[<*,1*>]", 10000, TD_OK},
      {"arrays of arrays", run_json, 0, "[<*,[[[[[[[[]]]]]]]]*>]", 1000, TD_OK},
      {"numbers", run_json, 0, "[<*,-1.2345678901234567890e-30^*>]", 5000, TD_OK},
      {"members", run_json, 0, "{<*,~^~:^*>}", 5000, TD_OK},
      {"members alike", run_json, 0, "{<*,~" ALIKE "^~:^*>}", 5000, TD_OK},
      {"equal members", run_json, 0, "{<*,~a~:^*>}", 5000, TD_OK},
      {"a string", run_json, 0, "~<*a*>~", 100000, TD_OK},
      {"escapes", run_json, 0, "~<*\\u00e9\\\\\\n*>~", 10000, TD_OK},
      {"pairs of surrogates", run_json, 0, "~<*\\ud83d\\ude00*>~", 10000, TD_OK},
      {"white space", run_json, 0, "[<* \n\t*>]", 10000, TD_OK},
      {"no end", run_json, 0, "[<*,~a*>", 10000, TD_EFORMAT},
      {"names", run_names, 0, "[<*,~^~*>]", 5000, TD_OK},
      {"names alike", run_names, 0, "[<*,~" ALIKE "^~*>]", 5000, TD_OK},
      {"equal names", run_names, 0, "[<*,~a~*>]", 5000, TD_OK},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}

// ---- requests -----------------------------------------------------------------------------------

static const td_api_defaults defaults = {
    .temperature = 0.5f, .top_p = 0.75f, .top_k = 20, .n_vocab = 100000};

// A chat, as far as the prompt's variables and its turns.
static td_status run_chat(void *arg) {
  input *in = arg;
  td_api_request r;
  td_api_error error;
  td_status st = td_api_parse_chat(&r, td_buf_text(&in->text), in->text.len, &defaults, &error);
  if (st == TD_OK) {
    td_digest *places = calloc(r.n_marks + 1, sizeof *places);
    td_api_turn_places(&r, places);
    free(places);
  }
  if (st != TD_OK) snprintf(in->why, sizeof in->why, "%s", error.message);
  td_api_request_free(&r);
  return st;
}

static td_status run_other(void *arg) {
  static td_status (*const parsers[])(td_api_request *, const char *, size_t,
                                      const td_api_defaults *, td_api_error *) = {
      td_api_parse_completion, td_api_parse_tokenize, td_api_parse_detokenize};
  input *in = arg;
  td_api_request r;
  td_api_error error;
  td_status st = parsers[in->with](&r, td_buf_text(&in->text), in->text.len, &defaults, &error);
  td_api_request_free(&r);
  return st;
}

#define CHAT(rest) "{~messages~:[{~role~:~user~,~content~:~hi~}]," rest "}"
#define TOOL(name, rest)                                                                           \
  "{~type~:~function~,~function~:{~name~:~" name "~,~parameters~:{~type~:~object~" rest "}}}"

#define OPEN20  "[[[[[[[[[[[[[[[[[[[["
#define CLOSE20 "]]]]]]]]]]]]]]]]]]]]"

TEST(chats) {
  enum { COMPLETION, TOKENIZE, DETOKENIZE };
  static const shape shapes[] = {
      {"messages", run_chat, 0, "{~messages~:[<*,{~role~:~user~,~content~:~^~}*>]}", 2000, TD_OK},
      {"turns", run_chat, 0,
       "{~messages~:[<*,{~role~:~user~,~content~:~^~},{~role~:~assistant~,~content~:~^~}*>]}", 1000,
       TD_OK},
      {"a long message", run_chat, 0, "{~messages~:[{~role~:~user~,~content~:~<*ab\\n*>~}]}", 50000,
       TD_OK},
      {"parts", run_chat, 0,
       "{~messages~:[{~role~:~user~,~content~:[<*,{~type~:~text~,~text~:~^~}*>]}]}", 3000, TD_OK},
      {"parts in parts", run_chat, 0,
       "{~messages~:[{~role~:~user~,~content~:[{~type~:~a~,~content~:[{~type~:~a~,~content~:["
       "<*,{~type~:~text~,~text~:~^~}*>]}]}]}]}",
       3000, TD_OK},
      {"members of a message", run_chat, 0,
       "{~messages~:[{<*,~^~:^*>,~role~:~user~,~content~:~a~}]}", 3000, TD_OK},
      {"members of a body", run_chat, 0, CHAT("<*,~^~:^*>"), 3000, TD_OK},
      {"calls", run_chat, 0,
       "{~messages~:[{~role~:~user~,~content~:~a~},{~role~:~assistant~,~tool_calls~:[<*,{~id~:~^~,"
       "~type~:~function~,~function~:{~name~:~f^~,~arguments~:~{}~}}*>]}]}",
       1000, TD_OK},
      {"arguments", run_chat, 0,
       "{~messages~:[{~role~:~user~,~content~:~a~},{~role~:~assistant~,~tool_calls~:[{~id~:~a~,"
       "~type~:~function~,~function~:{~name~:~f~,~arguments~:{<*,~^~:^*>}}}]}]}",
       3000, TD_OK},
      {"arguments as text", run_chat, 0,
       "{~messages~:[{~role~:~user~,~content~:~a~},{~role~:~assistant~,~tool_calls~:[{~id~:~a~,"
       "~type~:~function~,~function~:{~name~:~f~,~arguments~:~{<*,\\~^\\~:^*>}~}}]}]}",
       3000, TD_OK},
      {"nested arguments", run_chat, 0,
       "{~messages~:[{~role~:~user~,~content~:~a~},{~role~:~assistant~,~tool_calls~:[{~id~:~a~,"
       "~type~:~function~,~function~:{~name~:~f~,~arguments~:{~a~:" OPEN20 "<*,1*>" CLOSE20
       "}}}]}]}",
       3000, TD_OK},
      {"a nested argument of a template", run_chat, 0,
       CHAT("~chat_template_kwargs~:{~a~:" OPEN20 OPEN20 OPEN20 "<*,1*>" CLOSE20 CLOSE20 CLOSE20
            "}"),
       3000, TD_OK},
      {"lone surrogates", run_chat, 0, "{~messages~:[{~role~:~user~,~content~:~<*\\ud800*>~}]}",
       10000, TD_OK},
      {"tools", run_chat, 0, CHAT("~tools~:[<*," TOOL("f^", "") "*>]"), 1000, TD_OK},
      {"a tool's parameters", run_chat, 0,
       CHAT("~tools~:[" TOOL("f", ",~properties~:{<*,~^~:{~type~:~string~}*>}") "]"), 2000, TD_OK},
      {"allowed tools", run_chat, 0,
       CHAT("~tools~:[<*," TOOL(
           "f^",
           "") "*>],~tool_choice~:{~type~:~allowed_tools~,~allowed_tools~"
               ":{~mode~:~auto~,~tools~:[<*,{~type~:~function~,~function~:{~name~:~f^~}}*>]}}"),
       250, TD_OK},
      {"many allowed tools", run_chat, 0,
       CHAT("~tools~:[<*," TOOL(
           "f^",
           "") "*>],~tool_choice~:{~type~:~allowed_tools~,~allowed_tools~"
               ":{~mode~:~auto~,~tools~:[<*,{~type~:~function~,~function~:{~name~:~f^~}}*>]}}"),
       2000, TD_EINVAL},
      {"logit bias", run_chat, 0, CHAT("~logit_bias~:{<*,~^~:1*>}"), 500, TD_OK},
      {"too many biases", run_chat, 0, CHAT("~logit_bias~:{<*,~^~:1*>}"), 20000, TD_EINVAL},
      {"a long stop", run_chat, 0, CHAT("~stop~:~<*ab*>~"), 20000, TD_EINVAL},
      {"stops", run_chat, 0, CHAT("~stop~:[<*,~^~*>]"), 20000, TD_EINVAL},
      {"arguments of templates", run_chat, 0, CHAT("~chat_template_kwargs~:{<*,~^~:1*>}"), 20000,
       TD_EINVAL},
      {"a template's argument", run_chat, 0, CHAT("~chat_template_kwargs~:{~a~:{<*,~^~:1*>}}"),
       5000, TD_OK},
      {"a long name of a model", run_chat, 0, CHAT("~model~:~<*a*>~"), 50000, TD_OK},
      {"a prompt", run_other, COMPLETION, "{~prompt~:~<*a*>~}", 50000, TD_OK},
      {"a prompt's tokens", run_other, COMPLETION, "{~prompt~:[<*,^*>]}", 20000, TD_OK},
      {"prompts", run_other, COMPLETION, "{~prompt~:[<*,~^~*>]}", 20000, TD_EINVAL},
      {"tokens", run_other, DETOKENIZE, "{~tokens~:[<*,^*>]}", 20000, TD_OK},
      {"text", run_other, TOKENIZE, "{~content~:~<*a*>~}", 20000, TD_OK},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}

// ---- other protocols ----------------------------------------------------------------------------

enum { RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, LLAMA, INFILL };

// Behind a form feed, if there is one; before it is a response that was stored.
static td_status run_dialect(void *arg) {
  static const td_dialect *const dialects[] = {&td_dialect_responses,   &td_dialect_messages,
                                               &td_dialect_ollama_chat, &td_dialect_ollama_generate,
                                               &td_dialect_completion,  &td_dialect_infill};
  input *in = arg;
  const char *text = td_buf_text(&in->text), *begin = strchr(text, '\f');
  td_dialect_state state = {.store = td_response_store_open()};
  td_buf out = TD_BUF_INIT;
  td_api_error error;
  td_api_request r = {0};
  if (begin) {
    td_buf none = TD_BUF_INIT, response = TD_BUF_INIT;
    td_buf_add(&response, text, (size_t)(begin - text));
    td_response_store_put(state.store, 0, "resp_r", (const td_buf *[]){&none, &none, &response});
    td_buf_free(&response);
    text = begin + 1;
  }
  td_status st = td_dialect_translate(dialects[in->with], &state, text, strlen(text), &out, &error);
  if (st == TD_OK) {
    st = (state.is_text ? td_api_parse_completion : td_api_parse_chat)(&r, td_buf_text(&out),
                                                                       out.len, &defaults, &error);
    if (st != TD_OK) td_dialect_name(&state, &error);
  }
  if (st != TD_OK) snprintf(in->why, sizeof in->why, "%s", error.message);
  td_api_request_free(&r);
  td_response_store_close(state.store);
  td_dialect_state_free(&state);
  td_buf_free(&out);
  return st;
}

TEST(dialects) {
  static const shape shapes[] = {
      {"messages: turns", run_dialect, MESSAGES,
       "{~max_tokens~:1,~model~:~m~,~messages~:[<*,{~role~:~user~,~content~:~^~},{~role~:"
       "~assistant~,~content~:~^~}*>,{~role~:~user~,~content~:~a~}]}",
       1000, TD_OK},
      {"messages: blocks", run_dialect, MESSAGES,
       "{~max_tokens~:1,~model~:~m~,~messages~:[{~role~:~user~,~content~:[<*,{~type~:~text~,~text~:"
       "~^~}*>]}]}",
       2000, TD_OK},
      {"messages: system", run_dialect, MESSAGES,
       "{~max_tokens~:1,~model~:~m~,~system~:[<*,{~type~:~text~,~text~:~^~}*>],~messages~:[{~role~:"
       "~user~,~content~:~a~}]}",
       2000, TD_OK},
      {"messages: tools used", run_dialect, MESSAGES,
       "{~max_tokens~:1,~model~:~m~,~messages~:[{~role~:~user~,~content~:~a~},{~role~:~assistant~,"
       "~content~:[<*,{~type~:~tool_use~,~id~:~t^~,~name~:~f~,~input~:{}}*>]},{~role~:~user~,"
       "~content~:[<*,{~type~:~tool_result~,~tool_use_id~:~t^~,~content~:~a~}*>]}]}",
       500, TD_OK},
      {"messages: thoughts", run_dialect, MESSAGES,
       "{~max_tokens~:1,~model~:~m~,~messages~:[{~role~:~user~,~content~:~a~},{~role~:~assistant~,"
       "~content~:[<*,{~type~:~thinking~,~thinking~:~^~,~signature~:~a~}*>]},{~role~:~user~,"
       "~content~:~a~}]}",
       1000, TD_OK},
      {"messages: tools", run_dialect, MESSAGES,
       "{~max_tokens~:1,~model~:~m~,~tools~:[<*,{~name~:~f^~,~input_schema~:{~type~:~object~}}*>],"
       "~messages~:[{~role~:~user~,~content~:~a~}]}",
       1000, TD_OK},
      {"responses: items", run_dialect, RESPONSES,
       "{~model~:~m~,~input~:[<*,{~role~:~user~,~content~:~^~}*>]}", 1000, TD_OK},
      {"responses: parts", run_dialect, RESPONSES,
       "{~model~:~m~,~input~:[{~role~:~user~,~content~:[<*,{~type~:~input_text~,~text~:~^~}*>]}]}",
       1000, TD_OK},
      {"responses: calls", run_dialect, RESPONSES,
       "{~model~:~m~,~input~:[{~role~:~user~,~content~:~a~},<*,{~type~:~function_call~,~call_id~:~"
       "c^~,"
       "~name~:~f~,~arguments~:~{}~}*>,<*,{~type~:~function_call_output~,~call_id~:~c^~,~output~:~"
       "a~"
       "}*>]}",
       500, TD_OK},
      {"responses: calls in turn", run_dialect, RESPONSES,
       "{~model~:~m~,~input~:[{~role~:~user~,~content~:~a~},<*,{~type~:~function_call~,~call_id~:~"
       "c^~,"
       "~name~:~f~,~arguments~:~{}~},{~type~:~function_call_output~,~call_id~:~c^~,~output~:~a~}*>]"
       "}",
       500, TD_OK},
      {"responses: tools", run_dialect, RESPONSES,
       "{~model~:~m~,~input~:~a~,~tools~:[<*,{~type~:~function~,~name~:~f^~,~parameters~:{~type~:"
       "~object~}}*>]}",
       1000, TD_OK},
      {"responses: custom tools", run_dialect, RESPONSES,
       "{~model~:~m~,~input~:~a~,~tools~:[<*,{~type~:~custom~,~name~:~f^~}*>]}", 1000, TD_OK},
      {"responses: custom calls", run_dialect, RESPONSES,
       "{~model~:~m~,~tools~:[<*,{~type~:~custom~,~name~:~f^~}*>],~input~:[{~role~:~user~,~content~"
       ":"
       "~a~},<*,{~type~:~custom_tool_call~,~call_id~:~c^~,~name~:~f^~,~input~:~a~}*>]}",
       500, TD_OK},
      {"responses: thoughts", run_dialect, RESPONSES,
       "{~model~:~m~,~input~:[{~role~:~user~,~content~:~a~},<*,{~type~:~reasoning~,~id~:~r^~,"
       "~summary~:[],~content~:[{~type~:~reasoning_text~,~text~:~a~}]}*>]}",
       1000, TD_OK},
      {"responses: references", run_dialect, RESPONSES,
       "{~output~:[<*,{~type~:~message~,~role~:~assistant~,~id~:~msg_r_^~,~content~:~a~}*>]}\f"
       "{~model~:~m~,~input~:[<*,{~type~:~item_reference~,~id~:~msg_r_^~}*>]}",
       100, TD_OK},
      {"responses: many references", run_dialect, RESPONSES,
       "{~output~:[<*,{~type~:~message~,~role~:~assistant~,~id~:~msg_r_^~,~content~:~a~}*>]}\f"
       "{~model~:~m~,~input~:[<*,{~type~:~item_reference~,~id~:~msg_r_0~}*>]}",
       1500, TD_EINVAL},
      {"ollama: turns", run_dialect, OLLAMA_CHAT,
       "{~model~:~m~,~messages~:[<*,{~role~:~user~,~content~:~^~},{~role~:~assistant~,~content~:~^~"
       "}"
       "*>]}",
       1000, TD_OK},
      {"ollama: calls", run_dialect, OLLAMA_CHAT,
       "{~model~:~m~,~messages~:[{~role~:~user~,~content~:~a~},{~role~:~assistant~,~content~:~~,"
       "~tool_calls~:[<*,{~function~:{~name~:~f^~,~arguments~:{}}}*>]},<*,{~role~:~tool~,~tool_"
       "name~:"
       "~f^~,~content~:~a~}*>]}",
       500, TD_OK},
      {"ollama: options", run_dialect, OLLAMA_CHAT,
       "{~model~:~m~,~options~:{<*,~o^~:1*>},~messages~:[{~role~:~user~,~content~:~a~}]}", 5000,
       TD_OK},
      {"ollama: context", run_dialect, OLLAMA_GENERATE,
       "{~model~:~m~,~prompt~:~a~,~context~:[<*,^*>]}", 5000, TD_OK},
      {"ollama: a template", run_dialect, OLLAMA_GENERATE,
       "{~model~:~m~,~prompt~:~a~,~template~:~<*{{ .Prompt }}*>~}", 2000, TD_OK},
      {"llama: a prompt", run_dialect, LLAMA, "{~prompt~:~<*a*>~}", 20000, TD_OK},
      {"llama: a prompt's tokens", run_dialect, LLAMA, "{~prompt~:[<*,^*>]}", 10000, TD_OK},
      {"llama: biases", run_dialect, LLAMA, "{~prompt~:~a~,~logit_bias~:[<*,[^,1]*>]}", 500, TD_OK},
      {"llama: fields", run_dialect, LLAMA, "{~prompt~:~a~,~response_fields~:[<*,~f^~*>]}", 2000,
       TD_OK},
      {"llama: samplers", run_dialect, LLAMA, "{~prompt~:~a~,~samplers~:[<*,~top_k~*>]}", 2000,
       TD_OK},
      {"infill", run_dialect, INFILL,
       "{~input_prefix~:~<*a*>~,~input_suffix~:~a~,~input_extra~:[<*,{~filename~:~f^~,~text~:~a~}*>"
       "]"
       "}",
       1000, TD_EINTERNAL},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}
