// tests/unit/test_cost_grammar.c - the same as test_cost.c of what an answer must match: schemas,
// patterns, grammars and tools, from a request to its grammar.
// CTest: no-asan no-tsan
#include "unit/cost_steps.h"

#include "api/calls/call_syntax.h"
#include "api/request.h"

static const td_api_defaults defaults = {
    .temperature = 0.5f, .top_p = 0.75f, .top_k = 20, .n_vocab = 100000};

// A chat and the grammar of its answer.
static td_status run_compose(void *arg) {
  input *in = arg;
  td_api_request r;
  td_api_error error;
  td_status st = td_api_parse_chat(&r, td_buf_text(&in->text), in->text.len, &defaults, &error);
  if (st == TD_OK) {
    st = td_api_compose_grammar(&r, td_call_syntax_of_form((td_call_form)in->with),
                                TD_REASONING_NONE, &error);
  }
  if (st != TD_OK) snprintf(in->why, sizeof in->why, "%s", error.message);
  td_api_request_free(&r);
  return st;
}

#define CHAT(rest) "{~messages~:[{~role~:~user~,~content~:~hi~}]," rest "}"
#define TOOL(name, rest)                                                                           \
  "{~type~:~function~,~function~:{~name~:~" name "~,~parameters~:{~type~:~object~" rest "}}}"

#define FORMAT(schema)                                                                             \
  CHAT("~response_format~:{~type~:~json_schema~,~json_schema~:{~name~:~a~,~schema~:" schema "}}")
#define GRAMMAR(text) CHAT("~guided_grammar~:~" text "~")
#define REGEX(text)   CHAT("~guided_regex~:~" text "~")

TEST(constraints) {
  static const shape shapes[] = {
      {"properties", run_compose, 0, FORMAT("{~type~:~object~,~properties~:{<*,~^~:{}*>}}"), 500,
       TD_OK},
      {"required properties", run_compose, 0,
       FORMAT("{~type~:~object~,~properties~:{<*,~^~:{}*>},~required~:[<*,~^~*>],"
              "~additionalProperties~:false}"),
       500, TD_OK},
      {"a long name of a property", run_compose, 0,
       FORMAT("{~type~:~object~,~additionalProperties~:true,~properties~:{~<*a*>~:{}}}"), 1000,
       TD_OK},
      {"definitions", run_compose, 0,
       FORMAT("{~$defs~:{<*,~d^~:{~type~:~string~}*>},~type~:~object~,~properties~:{"
              "<*,~^~:{~$ref~:~#/$defs/d^~}*>}}"),
       300, TD_OK},
      {"alternatives", run_compose, 0, FORMAT("{~anyOf~:[<*,{~const~:~a^~}*>]}"), 200, TD_OK},
      {"alternatives beside properties", run_compose, 0,
       FORMAT("{~anyOf~:[<*,{~type~:~object~}*>],~properties~:{~a~:{},~b~:{}}}"), 100, TD_OK},
      {"properties beside alternatives", run_compose, 0,
       FORMAT("{~anyOf~:[{~type~:~object~},{}],~properties~:{<*,~^~:{}*>}}"), 200, TD_OK},
      {"an enum", run_compose, 0, FORMAT("{~enum~:[<*,~a^~*>]}"), 1000, TD_OK},
      {"all of", run_compose, 0, FORMAT("{~allOf~:[<*,{~properties~:{~^~:{}}}*>]}"), 100, TD_OK},
      {"a chain of references", run_compose, 0,
       FORMAT("{~$defs~:{<*~d^~:{~type~:~array~,~items~:{~$ref~:~#/$defs/d`~}},*>~d`~:{}},"
              "~$ref~:~#/$defs/d0~}"),
       200, TD_OK},
      // Each pair is compared, of at most 512.
      {"one of", run_compose, 0,
       FORMAT("{~oneOf~:[<*,{~type~:~object~,~properties~:{~k^~:{}},~required~:[~k^~],"
              "~additionalProperties~:false}*>]}"),
       10, TD_OK},
      {"two enums", run_compose, 0, FORMAT("{~allOf~:[{~enum~:[<*,^*>]},{~enum~:[<*,^*>]}]}"), 500,
       TD_OK},
      {"two lists of required", run_compose, 0,
       FORMAT("{~type~:~object~,~properties~:{<*,~^~:{}*>},~allOf~:[{~required~:[<*,~^~*>]},"
              "{~required~:[<*,~^~*>]}]}"),
       200, TD_OK},
      {"items of a tuple", run_compose, 0,
       FORMAT("{~type~:~array~,~items~:false,~prefixItems~:[<*,{}*>]}"), 30, TD_OK},
      {"schemas in schemas", run_compose, 0,
       FORMAT("{~type~:~object~,~properties~:{~a~:{~properties~:{~a~:{~properties~:{~a~:{"
              "~properties~:{<*,~^~:{}*>}}}}}}}}"),
       200, TD_OK},
      {"a pattern", run_compose, 0, FORMAT("{~type~:~string~,~pattern~:~^<*[ab]c*>$~}"), 1000,
       TD_OK},
      {"nothing, repeated", run_compose, 0,
       FORMAT("{~type~:~string~,~pattern~:~^(((){64}){64}){64}<*a*>$~}"), 1000, TD_OK},
      {"a regular expression", run_compose, 0, REGEX("<*(a|b)*>"), 1000, TD_OK},
      {"groups in groups", run_compose, 0, REGEX("<*(*>"), 10000, TD_EINVAL},
      {"alternatives of an expression", run_compose, 0, REGEX("a<*|b^*>"), 1000, TD_OK},
      {"choices", run_compose, 0, CHAT("~guided_choice~:[<*,~a^~*>]"), 1000, TD_OK},
      {"rules", run_compose, 0, GRAMMAR("root ::= r0\\n<*r^ ::= [a]\\n*>"), 500, TD_OK},
      {"a chain of rules", run_compose, 0,
       GRAMMAR("root ::= r0\\n<*r^ ::= [a] r` | [b]\\n*>r` ::= [c]\\n"), 500, TD_OK},
      {"rules of one rule", run_compose, 0, GRAMMAR("root ::= r0\\n<*r^ ::= r`\\n*>r` ::= [c]\\n"),
       500, TD_OK},
      {"rules that are nothing", run_compose, 0,
       GRAMMAR("root ::= r0 [a]\\n<*r^ ::= r` r`\\n*>r` ::= [c]?\\n"), 200, TD_OK},
      {"groups of a grammar", run_compose, 0, GRAMMAR("root ::= <*(*>[a]<*)*>"), 2000, TD_EINVAL},
      {"a class of many", run_compose, 0, GRAMMAR("root ::= [<*abc*>]"), 1000, TD_OK},
      {"a literal", run_compose, 0, GRAMMAR("root ::= \\~<*abc*>\\~"), 1000, TD_OK},
      {"alternatives of a grammar", run_compose, 0, GRAMMAR("root ::= [a]<* | \\~ab^\\~*>"), 500,
       TD_OK},
      {"comments", run_compose, 0, GRAMMAR("root ::= [a]\\n<*# a\\n*>"), 5000, TD_OK},
      {"nested repeats", run_compose, 0,
       GRAMMAR("root ::= (((\\~\\~){100}){100}){100} [a]<* [a]*>"), 500, TD_OK},
      {"a tool's references", run_compose, 0,
       CHAT("~tools~:[" TOOL("f", ",~$defs~:{<*,~d^~:{~type~:~string~}*>},~properties~:{"
                                  "<*,~^~:{~$ref~:~#/$defs/d^~}*>}") "]"),
       2000, TD_OK},
      {"required tools", run_compose, 0,
       CHAT("~tool_choice~:~required~,~tools~:[<*," TOOL("f^", "") "*>]"), 200, TD_OK},
      {"parameters of a required tool", run_compose, TD_CALL_FUNCTION,
       CHAT("~tool_choice~:~required~,~tools~:[" TOOL("f",
                                                      ",~properties~:{<*,~^~:{~type~:~string~}*>},"
                                                      "~required~:[<*,~^~*>]") "]"),
       1000, TD_OK},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}
