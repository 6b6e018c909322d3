// tests/unit/test_template.c - chat templates: limits, errors, typed spans, finding the file. What
// templates print is compared with Python's jinja2 in tests/e2e/test_template.py.
// CTest: no-tsan
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json_parse.h"
#include "text/template.h"
#include "unit/testing.h"

typedef struct {
  td_status status;
  td_err err;
  td_buf text;
  td_spans typed;
} result;

static void result_free(result *r) {
  td_buf_free(&r->text);
  td_spans_free(&r->typed);
}

static cJSON *parse_vars(const char *json) {
  cJSON *vars;
  td_err err;
  assert_int_equal(td_json_parse(&vars, json, strlen(json), TD_JSON_MAX_DEPTH, &err), TD_OK);
  return vars;
}

static result render_with(const char *source, const char *json, const td_template_opts *opts) {
  result r = {0};
  td_template *tmpl;
  r.status = td_template_open(&tmpl, source, strlen(source), &r.err);
  if (r.status != TD_OK) {
    assert_null(tmpl);
    return r;
  }
  cJSON *vars = parse_vars(json);
  r.status = td_template_render(tmpl, vars, opts, &r.text, &r.typed, &r.err);
  if (r.status != TD_OK) {
    assert_int_equal(r.text.len, 0);
    assert_int_equal(r.typed.n, 0);
  }
  cJSON_Delete(vars);
  td_template_close(tmpl);
  return r;
}

static void expect_text(const char *source, const char *json, const char *text) {
  result r = render_with(source, json, NULL);
  if (r.status != TD_OK) fail_msg("%s: %s", source, r.err.msg);
  assert_string_equal(td_buf_text(&r.text), text);
  result_free(&r);
}

static void expect_error(const char *source, td_status status, const char *words) {
  static const td_template_opts tight = {
      .max_output_bytes = 1 << 20, .max_memory_bytes = 16 << 20, .max_steps = 2000000};
  result r = render_with(source, "{\"n\": 5, \"text\": \"abc\"}", &tight);
  if (r.status != status || !strstr(r.err.msg, words)) {
    fail_msg("%.100s: status %d, %s", source, r.status, r.status ? r.err.msg : "no error");
  }
  result_free(&r);
}

TEST(renders) {
  expect_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}",
              "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}", "<user>hi\n");
  expect_text("{{ x|tojson }}", "{\"x\": [1.0, 1, 1e2, -0, 18446744073709551615, null]}",
              "[1.0, 1, 100.0, 0, 18446744073709551615, null]");
  expect_text("", "{}", "");
}

TEST(first_of_duplicate_keys_wins) {
  expect_text("{{ a }}{{ d.b }}", "{\"a\": 1, \"a\": 2, \"d\": {\"b\": 3, \"b\": 4}}", "13");
}

TEST(errors_have_lines) {
  expect_error("a\n{{ 1/0 }}", TD_EFORMAT, "line 2: division by zero");
  expect_error("a\n\n{{ x.y.z }}", TD_EFORMAT, "line 3: 'x' is undefined");
  expect_error("{% if n %}\n", TD_EFORMAT, "looking for the following tags: 'elif'");
  expect_error("\n{{ n n }}", TD_EFORMAT, "line 2: expected token 'end of print statement'");
  expect_error("\n\n{{ raise_exception('no ' ~ n) }}", TD_EINVAL, "line 3: no 5");
  expect_error("{% include 'x' %}", TD_EUNSUPPORTED, "line 1: 'include' is not supported");
  expect_error("{{ text.append }}{{ [].append(1) }}", TD_EFORMAT, "is unsafe");
  expect_error("\xff", TD_EFORMAT, "not UTF-8");
  expect_error("{{ '", TD_EFORMAT, "line 1");
}

// What Python's formatting has beside this is refused, never written differently.
TEST(other_formats_are_refused) {
  static const char *const sources[] = {
      "{{ '{:,}'.format(1) }}",
      "{{ '{:x}'.format(1) }}",
      "{{ '{:+d}'.format(1) }}",
      "{{ '{:*>5}'.format(1) }}",
      "{{ '{:<05}'.format(1) }}",
      "{{ '{!r}'.format(1) }}",
      "{{ '{:.3}'.format(1.5) }}",
      "{{ '{a.b}'.format(a=text) }}",
      "{{ '{:{}}'.format(1, 2) }}",
      "{{ '%x' % 1 }}",
      "{{ '%+d' % 1 }}",
      "{{ '%.3d' % 1 }}",
      "{{ '%(a)s' % {'a': 1} }}",
      "{{ '%*d' % (1, 2) }}",
      "{{ '%(a)s'|format(a=1) }}",
  };
  for (size_t i = 0; i < TD_COUNT(sources); i++)
    expect_error(sources[i], TD_EFORMAT, "");
}

TEST(hostile_templates_end) {
  expect_error("{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
               "{% endfor %}{% endfor %}{% endfor %}",
               TD_ELIMIT, "steps");
  expect_error("{% for a in range(1000000000) %}{% endfor %}", TD_ELIMIT, "Range too big");
  expect_error("{{ 'x' * 10000000000 }}", TD_ELIMIT, "memory");
  expect_error("{{ '' * 9223372036854775807 }}{{ ('a' * 100000) * 100000 }}", TD_ELIMIT, "memory");
  expect_error("{{ ([1] * 100000) * 100000 }}", TD_ELIMIT, "");
  expect_error("{{ [] * 9223372036854775807 }}{{ [1] * 9223372036854775807 }}", TD_ELIMIT, "");
  expect_error("{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
               "{% set ns.x = ns.x + ns.x %}{% endfor %}",
               TD_ELIMIT, "memory");
  expect_error("{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
               "{% set ns.x = ns.x + ns.x %}{% endfor %}",
               TD_ELIMIT, "");
  expect_error("{% set ns = namespace(x=1) %}{% for i in range(60) %}"
               "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
               TD_ELIMIT, "");
  expect_error("{% for i in range(99999) %}{{ text * 100 }}{% endfor %}", TD_ELIMIT, "output");
  expect_error("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", TD_ELIMIT, "deep");
  expect_error("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}"
               "{{ a() }}",
               TD_ELIMIT, "deep");
  expect_error("{{ '{:2147483647}'.format('a') }}", TD_ELIMIT, "memory");
  expect_error("{{ '%9999999999d' % 1 }}", TD_ELIMIT, "too big");
  expect_error("{{ '%.99999f' % 1.0 }}", TD_ELIMIT, "too big");
  expect_error("{{ '{:99999999999}'.format(1) }}", TD_ELIMIT, "");
  expect_error("{{ 2 ** 999999999 }}", TD_ELIMIT, "overflow");
  expect_error("{{ 9223372036854775807 + 1 }}", TD_ELIMIT, "overflow");
  expect_error("{{ ('a' * 300000).replace('', 'b' * 1000) }}", TD_ELIMIT, "memory");
  expect_error("{{ ('a' * 300000)|replace('a', 'b' * 1000) }}", TD_ELIMIT, "memory");
  expect_error("{{ ('\\n' * 100000)|indent(10000, blank=true) }}", TD_ELIMIT, "memory");
  expect_error("{% set ns = namespace(x=()) %}{% for i in range(90000) %}{% set ns.x = (ns.x,) %}"
               "{% endfor %}{{ ns.x }}",
               TD_ELIMIT, "deep");
  expect_error("{% set ns = namespace(x=()) %}{% for i in range(50000) %}{% set ns.x = (ns.x,) %}"
               "{% endfor %}{{ {ns.x: 1} }}",
               TD_ELIMIT, "deep");
  expect_error("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns }}", TD_ELIMIT, "deep");
}

// n times open, then middle, then n times close.
static char *nested(const char *open, const char *middle, const char *close, int n) {
  td_buf b = TD_BUF_INIT;
  for (int i = 0; i < n; i++)
    td_buf_str(&b, open);
  td_buf_str(&b, middle);
  for (int i = 0; i < n; i++)
    td_buf_str(&b, close);
  assert_non_null(b.data);
  return b.data;
}

// What memory has left limits a large render, and none that is small.
TEST(memory_is_shared) {
  static const char large[] = "{% set ns = namespace(x=[]) %}{% for i in range(160) %}"
                              "{% set ns.x = ns.x + ['ab' * 65536] %}{% endfor %}";
  const td_template_opts few = {.left_bytes = 6 << 20}, many = {.left_bytes = 600 << 20};
  result r = render_with(large, "{}", &few);
  assert_int_equal(r.status, TD_ELIMIT);
  assert_non_null(strstr(r.err.msg, "more than 16 MiB of memory"));
  result_free(&r);
  r = render_with(large, "{}", &many);
  assert_int_equal(r.status, TD_OK);
  result_free(&r);
  r = render_with("{{ 'a' * 1048576 }}", "{}", &few);
  assert_int_equal(r.status, TD_OK);
  result_free(&r);
}

TEST(a_canceled_render_ends) {
  static const char source[] = "{% for a in range(99999) %}{% for b in range(99999) %}"
                               "{% endfor %}{% endfor %}";
  const atomic_bool is_canceled = true;
  const td_template_opts opts = {.is_canceled = &is_canceled};
  result r = render_with(source, "{}", &opts);
  assert_int_equal(r.status, TD_ECANCELED);
  result_free(&r);
}

TEST(deep_sources_are_refused) {
  static const struct {
    const char *open, *middle, *close;
  } shapes[] = {
      {"{{ ((((((((((", "1", ""},
      {"{% if 1 %}", "", "{% endif %}"},
      {"{% for a in b %}", "", "{% endfor %}"},
      {"{% macro a() %}", "", "{% endmacro %}"},
  };
  for (size_t i = 0; i < TD_COUNT(shapes); i++) {
    char *source = nested(shapes[i].open, shapes[i].middle, shapes[i].close, 20000);
    expect_error(source, TD_ELIMIT, "deep");
    free(source);
  }
  static const struct {
    const char *begin, *open, *close, *end;
  } expressions[] = {
      {"{{ ", "(", ")", " }}"},
      {"{{ ", "[", "]", " }}"},
      {"{{ ", "not ", "", " }}"},
      {"{{ ", "-", "", " }}"},
      {"{{ ", "{1:", "}", " }}"},
      {"{{ n", "[n", "]", " }}"},
      {"{{ n", "(n", ")", " }}"},
      {"{{ ", "1 if ", "", " }}"},
      {"{{ 1", " + 1", "", " }}"},
      {"{{ 1", "|abs", "", " }}"},
      {"{{ n", ".x", "", " }}"},
      {"{{ n", "()", "", " }}"},
      {"{{ 1", " and 1", "", " }}"},
      {"{{ 1", " is odd", "", " }}"},
      {"{{ 1", " if 1 else 1", "", " }}"},
      {"{% set x", "|abs", "", "%}{% endset %}"},
  };
  for (size_t i = 0; i < TD_COUNT(expressions); i++) {
    char *inner = nested(expressions[i].open, "1", expressions[i].close, 100000);
    td_buf source = TD_BUF_INIT;
    td_buf_printf(&source, "%s%s%s", expressions[i].begin, inner, expressions[i].end);
    result r = render_with(td_buf_text(&source), "{}", NULL);
    assert_int_not_equal(r.status, TD_OK);
    result_free(&r);
    td_buf_free(&source);
    free(inner);
  }
}

TEST(ordinary_depth_is_fine) {
  char *inner = nested("(", "1", ")", 60);
  td_buf source = TD_BUF_INIT;
  td_buf_printf(&source, "{{ %s }}", inner);
  expect_text(td_buf_text(&source), "{}", "1");
  free(inner);
  td_buf_clear(&source);
  td_buf_str(&source, "{{ 'a'");
  for (int i = 0; i < 200; i++)
    td_buf_str(&source, " + 'a'");
  td_buf_str(&source, " }}");
  result r = render_with(td_buf_text(&source), "{}", NULL);
  assert_int_equal(r.status, TD_OK);
  assert_int_equal(r.text.len, 201);
  result_free(&r);
  td_buf_free(&source);
  expect_text("{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{% endif %}.{% endmacro %}"
              "{{ m(150)|length }}",
              "{}", "151");
}

// A template within its steps still ends when they take too long.
TEST(slow_templates_end) {
  static const td_template_opts opts = {.max_steps = UINT64_C(1) << 40, .max_cpu_ms = 1};
  result r = render_with("\n{% for a in range(99999) %}{% for b in range(99999) %}{% for c in "
                         "range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
                         "{}", &opts);
  assert_int_equal(r.status, TD_ELIMIT);
  if (!strstr(r.err.msg, "line 2: the template takes too long")) fail_msg("%s", r.err.msg);
  result_free(&r);
}

// The appended-to string in a loop must not be copied each time.
TEST(accumulating_is_linear) {
  static const td_template_opts opts = {.max_memory_bytes = 32 << 20, .max_steps = 3000000};
  result r = render_with("{% set ns = namespace(s='', t='') %}{% for i in range(20000) %}"
                         "{% set ns.s = ns.s + '0123456789abcdef' %}{% endfor %}{{ ns.s|length }}",
                         "{}", &opts);
  if (r.status != TD_OK) fail_msg("%s", r.err.msg);
  assert_string_equal(td_buf_text(&r.text), "320000");
  result_free(&r);
  r = render_with("{% set ns = namespace(s='') %}{% for i in range(20000) %}"
                  "{% set ns.s = ns.s + '<' + text %}{% endfor %}{{ ns.s }}",
                  "{\"text\": \"abc\"}", &opts);
  if (r.status != TD_OK) fail_msg("%s", r.err.msg);
  assert_int_equal(r.typed.n, 20000);
  for (size_t i = 0; i < r.typed.n; i++) {
    assert_int_equal(r.typed.spans[i].begin, 4 * i + 1);
    assert_int_equal(r.typed.spans[i].end, 4 * i + 4);
  }
  result_free(&r);
  // Two strings grown from one beginning stay apart.
  expect_text(
      "{% set a = 'x' + 'y' %}{% set b = a + '1' %}{% set c = a + '2' %}{{ b }}{{ c }}{{ a }}",
      "{}", "xy1xy2xy");
}

// The typed parts of the text, joined by '|'.
static void expect_typed(const char *source, const char *json, const char *expected) {
  result r = render_with(source, json, NULL);
  if (r.status != TD_OK) fail_msg("%s", r.err.msg);
  td_buf joined = TD_BUF_INIT;
  for (size_t i = 0; i < r.typed.n; i++) {
    td_span s = r.typed.spans[i];
    assert_true(s.begin < s.end && s.end <= r.text.len);
    if (i) {
      assert_true(s.begin > r.typed.spans[i - 1].end);
      td_buf_char(&joined, '|');
    }
    td_buf_add(&joined, r.text.data + s.begin, s.end - s.begin);
  }
  assert_string_equal(td_buf_text(&joined), expected);
  td_buf_free(&joined);
  result_free(&r);
}

TEST(typed_text_is_traced) {
  const char *vars = "{\"messages\": [{\"role\": \"user\", \"content\": \" a<b>,c \"}], "
                     "\"tools\": [{\"k<\": \"v\\\"\\u00e9\"}], \"bos_token\": \"<s>\"}";
  expect_typed("{{ bos_token }}<|{{ messages[0].role }}|>{{ messages[0].content }}", vars,
               " a<b>,c ");
  expect_typed("x{{ messages[0].content.strip().split(',')|join('-') }}y", vars, "a<b>|c");
  expect_typed("{{ ('[' + messages[0].content + ']')[2:5] }}", vars, "a<b");
  expect_typed("{{ messages[0].content|replace('b', '+') }}", vars, " a<|>,c ");
  expect_typed("{{ messages[0].content|upper ~ 'z' }}", vars, " A<B>,C ");
  expect_typed(
      "{% set c = messages[0].content.strip() %}{% set a = '<' + c %}{% set a = a + '!' + c %}"
      "{% set x = a + c + '?' %}{% set y = a + '-' %}{{ x }} {{ y }} {{ a }}",
      vars, "a<b>,c|a<b>,ca<b>,c|a<b>,c|a<b>,c|a<b>,c|a<b>,c");
  expect_typed("{{ tools[0]|tojson }}", vars, "k<|v\\\"\xC3\xA9");
  expect_typed("{{ tools[0]|tojson(ensure_ascii=true) }}", vars, "k<|v\\\"\\u00e9");
  expect_typed("{{ tools[0] }}", vars, "k<|v\"\xC3\xA9");
  expect_typed("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages[0].content.strip()) }}", vars,
               "a<b>,c");
  expect_typed("{% set x %}<{{ messages[0].content.strip() }}>{% endset %}{{ x|trim('<>') }}", vars,
               "a<b>,c");
  expect_typed("{{ '%s!%5s' % (messages[0].content.strip(), 'q') }}", vars, "a<b>,c");
  expect_typed("{{ '{0}!{0:>8}'.format(messages[0].content.strip()) }}", vars, "a<b>,c|a<b>,c");
  expect_typed("{{ messages[0].content[::-1] }}", vars, " c,>b<a ");
  expect_typed("{% for c in messages[0].content.strip() %}{{ c }}{% endfor %}", vars, "a<b>,c");
  expect_typed("{{ messages[0].content.strip().partition('<')|join(' ') }}", vars, "a|<|b>,c");
  expect_typed("{{ messages[0].role + messages[0].role|upper }}", vars, "");
  expect_typed("{{ messages[0].role }}", "{\"messages\": [{\"role\": \"endoftext\"}]}",
               "endoftext");
}

TEST(appends_behind_what_is_there) {
  td_template *tmpl;
  td_err err;
  assert_int_equal(td_template_open(&tmpl, "{{ m }}", 7, &err), TD_OK);
  cJSON *vars = parse_vars("{\"m\": \"xy\"}");
  td_buf out = TD_BUF_INIT;
  td_spans typed = {0};
  td_buf_str(&out, "abc");
  assert_int_equal(td_template_render(tmpl, vars, NULL, &out, &typed, &err), TD_OK);
  assert_int_equal(td_template_render(tmpl, vars, NULL, &out, &typed, &err), TD_OK);
  assert_string_equal(out.data, "abcxyxy");
  assert_int_equal(typed.n, 2);
  assert_int_equal(typed.spans[1].begin, 5);
  assert_int_equal(typed.spans[1].end, 7);
  assert_int_equal(td_template_render(tmpl, vars, NULL, &out, NULL, NULL), TD_OK);
  assert_int_equal(td_template_render(tmpl, NULL, NULL, &out, NULL, &err), TD_EINVAL);
  td_spans_free(&typed);
  td_buf_free(&out);
  cJSON_Delete(vars);
  td_template_close(tmpl);
  td_template_close(NULL);
}

static const char shared_source[] =
    "{% set ns = namespace(s='a' 'b') %}{% for i in range(50) %}{% set ns.s = ns.s + 'c' ~ i %}"
    "{% endfor %}{{ ns.s }}{{ 'ab' + 'cd' }}";

static void *render_many(void *arg) {
  td_buf out = TD_BUF_INIT;
  cJSON *vars = parse_vars("{}");
  for (int i = 0; i < 200; i++) {
    td_buf_clear(&out);
    td_err err;
    if (td_template_render(arg, vars, NULL, &out, NULL, &err) != TD_OK) break;
  }
  cJSON_Delete(vars);
  char *text = strdup(td_buf_text(&out));
  td_buf_free(&out);
  return text;
}

TEST(threads_share_a_template) {
  td_template *tmpl;
  td_err err;
  assert_int_equal(td_template_open(&tmpl, shared_source, strlen(shared_source), &err), TD_OK);
  pthread_t threads[4];
  for (int i = 0; i < 4; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, render_many, tmpl), 0);
  char *texts[4];
  for (int i = 0; i < 4; i++) {
    pthread_join(threads[i], (void **)&texts[i]);
    assert_non_null(strstr(texts[i], "c48c49abcd"));
    assert_string_equal(texts[i], texts[0]);
  }
  for (int i = 0; i < 4; i++)
    free(texts[i]);
  td_template_close(tmpl);
}

// ---- model directories ----

static void write_text(const char *dir, const char *name, const char *text) {
  char path[256];
  td_err err;
  snprintf(path, sizeof path, "%s/%s", dir, name);
  assert_int_equal(td_file_write(path, text, strlen(text), &err), TD_OK);
}

static void remove_file(const char *dir, const char *name) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  unlink(path);
}

static void expect_model(const char *dir, const char *json, const char *text) {
  td_template *tmpl;
  td_err err;
  td_status st = td_template_open_model(&tmpl, dir, &err);
  if (st != TD_OK) fail_msg("%s", err.msg);
  cJSON *vars = parse_vars(json);
  td_buf out = TD_BUF_INIT;
  assert_int_equal(td_template_render(tmpl, vars, NULL, &out, NULL, &err), TD_OK);
  assert_string_equal(td_buf_text(&out), text);
  td_buf_free(&out);
  cJSON_Delete(vars);
  td_template_close(tmpl);
}

static void expect_no_model(const char *dir, td_status status, const char *words) {
  td_template *tmpl;
  td_err err;
  assert_int_equal(td_template_open_model(&tmpl, dir, &err), status);
  assert_null(tmpl);
  if (!strstr(err.msg, words)) fail_msg("%s", err.msg);
}

TEST(models_have_their_templates) {
  char dir[] = "/tmp/test_template_XXXXXX";
  assert_non_null(mkdtemp(dir));
  expect_no_model(dir, TD_ENOENT, "no chat template");
  write_text(dir, "tokenizer_config.json", "{}");
  expect_no_model(dir, TD_ENOENT, "no chat_template");
  write_text(dir, "tokenizer_config.json", "{\"chat_template\": \"one {{ n }}\"}");
  expect_model(dir, "{\"n\": 1}", "one 1");
  write_text(dir, "tokenizer_config.json",
             "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"tools\"},"
             "{\"name\": \"default\", \"template\": \"plain\"}]}");
  expect_model(dir, "{\"tools\": null}", "plain");
  expect_model(dir, "{\"tools\": [1]}", "tools");
  write_text(dir, "tokenizer_config.json",
             "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"x\"}]}");
  expect_no_model(dir, TD_ENOENT, "named default");
  write_text(dir, "tokenizer_config.json", "{\"chat_template\": \"\\n{% if %}\"}");
  expect_no_model(dir, TD_EFORMAT, "tokenizer_config.json: chat template: line 2");
  write_text(dir, "chat_template.jinja", "file\n");
  expect_model(dir, "{}", "file");
  write_text(dir, "chat_template.jinja", "{{");
  expect_no_model(dir, TD_EFORMAT, "chat_template.jinja: chat template: line 1");
  remove_file(dir, "chat_template.jinja");
  remove_file(dir, "tokenizer_config.json");
  rmdir(dir);
}

// Models whose prompts a program describes have a template here, unless they bring one.
TEST(some_models_have_one_of_ours) {
  static const char hi[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], "
                           "\"add_generation_prompt\": true, \"reasoning_effort\": \"high\"}";
  static const char asked[] = "<｜User｜>Hi<｜Assistant｜>";
  char dir[] = "/tmp/test_template_XXXXXX", encoding[sizeof dir + 16], text[2000];
  td_buf effort = TD_BUF_INIT;
  td_err err;
  assert_non_null(mkdtemp(dir));
  snprintf(encoding, sizeof encoding, "%s/encoding", dir);
  assert_int_equal(mkdir(encoding, 0700), 0);
  write_text(dir, "config.json", "{\"model_type\": \"qwen3_moe\"}");
  expect_no_model(dir, TD_ENOENT, "no chat template");
  write_text(dir, "config.json", "{\"model_type\": \"deepseek_v32\"}");
  snprintf(text, sizeof text, "%s</think>", asked);
  expect_model(dir, hi, text);
  write_text(dir, "tokenizer_config.json", "{}");
  write_text(dir, "config.json", "{\"model_type\": \"deepseek_v4\"}");
  td_template *tmpl;
  assert_int_equal(td_template_open_model(&tmpl, dir, &err), TD_OK);
  cJSON *vars = parse_vars(hi);
  assert_int_equal(td_template_render(tmpl, vars, NULL, &effort, NULL, &err), TD_OK);
  assert_ptr_equal(strstr(effort.data, "Reasoning Effort: Absolute maximum"), effort.data);
  snprintf(text, sizeof text, "%s<think>", asked);
  assert_string_equal(strstr(effort.data, asked), text);
  // Before July 2026 the text was that of a higher effort.
  write_text(encoding, "encoding_dsv4.py", "REASONING_EFFORT_MAX = (\n");
  expect_model(dir, hi, text);
  write_text(encoding, "encoding_dsv4.py", "REASONING_EFFORT_PROMPTS: Dict[str, str] = {\n");
  expect_model(dir, hi, effort.data);
  write_text(dir, "tokenizer_config.json", "{\"chat_template\": \"one\"}");
  expect_model(dir, hi, "one");
  td_buf_free(&effort);
  cJSON_Delete(vars);
  td_template_close(tmpl);
  remove_file(encoding, "encoding_dsv4.py");
  rmdir(encoding);
  remove_file(dir, "tokenizer_config.json");
  remove_file(dir, "config.json");
  rmdir(dir);
}
