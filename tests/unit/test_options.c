// The option table: command line, configuration file, help.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "options/options_impl.h"
#include "runtime/runtime_opts.h"
#include "unit/testing.h"

static td_options parsed;
static td_err error;

// Parses "tandem <words...>", freeing what was parsed before.
static td_status parse(const char *line) {
  static char words[1024];
  static char *argv[64];
  int argc = 0;
  snprintf(words, sizeof words, "tandem %s", line);
  for (char *word = strtok(words, " "); word; word = strtok(NULL, " "))
    argv[argc++] = word;
  td_options_free(&parsed);
  return td_options_parse(&parsed, argc, argv, &error);
}

static int teardown(void **state) {
  (void)state;
  td_options_free(&parsed);
  return 0;
}

TEST(values_and_defaults, NULL, teardown) {
  assert_int_equal(parse("run -m dir -p hello --temperature=0.5 --top-k 40 --raw"), TD_OK);
  assert_int_equal(parsed.command, TD_CMD_RUN);
  assert_string_equal(parsed.model, "dir");
  assert_string_equal(parsed.prompt, "hello");
  assert_true(parsed.temperature == 0.5 && parsed.top_k == 40 && parsed.raw);
  assert_int_equal(parsed.n_predict, 1024);
  assert_true(td_options_given(&parsed, "temperature"));
  assert_false(td_options_given(&parsed, "top-p"));
  assert_int_equal(parse("run --raw --no-raw"), TD_OK);
  assert_false(parsed.raw);
}

TEST(several_names, NULL, teardown) {
  static const char *const lines[] = {"serve --served-model-name org/a b c --port 1",
                                      "serve --served-model-name org/a,b --model-name=c",
                                      "serve --model-name org/a,b,c"};
  for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
    assert_int_equal(parse(lines[i]), TD_OK);
    assert_int_equal(parsed.model_names.n, 3);
    assert_string_equal(parsed.model_names.values[0], "org/a");
    assert_string_equal(parsed.model_names.values[2], "c");
  }
  assert_int_equal(parse("serve --served-model-name ,"), TD_EINVAL);
}

TEST(two_word_commands, NULL, teardown) {
  assert_int_equal(parse("inspect --model dir --tensors"), TD_OK);
  assert_int_equal(parsed.command, TD_CMD_INSPECT);
  assert_int_equal(parse("inspect tokens --model dir --decode"), TD_OK);
  assert_int_equal(parsed.command, TD_CMD_INSPECT_TOKENS);
  assert_int_equal(parse("eval logits --token-ids 1,2,3 -o x"), TD_OK);
  assert_int_equal(parsed.token_ids.n, 3);
  assert_int_equal(parsed.token_ids.values[2], 3);
}

TEST(same_letter_in_two_commands, NULL, teardown) {
  assert_int_equal(parse("bench -p 16,512 -n 8"), TD_OK);
  assert_int_equal(parsed.bench_prompt.n, 2);
  assert_int_equal(parsed.bench_gen.values[0], 8);
  assert_null(parsed.prompt);
}

TEST(help_of_a_command, NULL, teardown) {
  assert_int_equal(parse("help run"), TD_OK);
  assert_true(parsed.help);
  assert_int_equal(parsed.command, TD_CMD_RUN);
  assert_int_equal(parse("help inspect tokens"), TD_OK);
  assert_int_equal(parsed.command, TD_CMD_INSPECT_TOKENS);
  assert_int_equal(parse("help"), TD_OK);
  assert_int_equal(parsed.command, TD_N_COMMANDS);
}

TEST(values_set_later, NULL, teardown) {
  td_buf text = TD_BUF_INIT;
  assert_int_equal(parse("run --temperature 0.6 --thinking off"), TD_OK);
  td_options_show(&text, &parsed, "temperature");
  td_options_show(&text, &parsed, "n-predict");
  td_options_show(&text, &parsed, "thinking");
  td_options_show(&text, &parsed, "effort");
  assert_string_equal(td_buf_text(&text), "0.61024off");
  td_buf_free(&text);
  assert_int_equal(td_options_set(&parsed, "temperature", NULL, &error), TD_OK);
  assert_false(td_options_given(&parsed, "temperature"));
  assert_true(parsed.temperature == 1);
  assert_int_equal(td_options_set(&parsed, "effort", "low", &error), TD_OK);
  assert_string_equal(parsed.effort, "low");
  assert_int_equal(td_options_set(&parsed, "effort", NULL, &error), TD_OK);
  assert_null(parsed.effort);
  assert_int_equal(td_options_set(&parsed, "top-p", "2", &error), TD_EINVAL);
  assert_int_equal(td_options_set(&parsed, "port", "1", &error), TD_EINVAL); // not of run
}

// Without --model, as pull and other servers take it.
TEST(a_word_that_is_a_model, NULL, teardown) {
  assert_int_equal(parse("serve org/name:Q4_K_M --port 80"), TD_OK);
  assert_string_equal(parsed.model, "org/name:Q4_K_M");
  assert_int_equal(parse("bench kernels ./dir"), TD_OK);
  assert_string_equal(parsed.model, "./dir");
  assert_int_equal(parse("run -n 5 a.gguf"), TD_OK);
  assert_string_equal(parsed.model, "a.gguf");
}

static void expect_error(const char *line, const char *part) {
  assert_int_equal(parse(line), TD_EINVAL);
  if (!strstr(error.msg, part)) fail_msg("%s: \"%s\" lacks \"%s\"", line, error.msg, part);
}

TEST(errors_name_the_option, NULL, teardown) {
  expect_error("dance", "dance: not a command");
  expect_error("eval", "`tandem eval logits`, `tandem eval perplexity`");
  expect_error("eval nonsense", "`tandem eval chat`");
  expect_error("bench kernel", "kernel: unexpected word after `tandem bench`; did you mean `tandem "
                               "bench kernels`?");
  expect_error("bench what", "what: unexpected word after `tandem bench`; options begin with --");
  expect_error("serve nano", "options begin with --, and a model is --model DIR");
  expect_error("serve a/b c/d", "c/d: unexpected word after `tandem serve`; options begin with --");
  expect_error("run a/b Hello", "Hello: unexpected word after `tandem run`; a prompt is -p TEXT");
  expect_error("version", "did you mean `tandem --version`?");
  expect_error("ps --port 80", "--port: not an option of ps; did you mean --server?");
  expect_error("run --max-tokens 5", "did you mean --n-predict?");
  expect_error("chat", "chat: not a command; did you mean `tandem run`?");
  expect_error("srve", "srve: not a command; did you mean `tandem serve`?");
  expect_error("insepct", "did you mean `tandem inspect`?");
  expect_error("help rnu", "did you mean `tandem run`?");
  expect_error("run --temprature 1", "--temprature: not an option of run; did you mean "
                                     "--temperature?");
  expect_error("run --topp=1", "--topp=1: not an option of run; did you mean --top-p?");
  expect_error("run --xyz 1", "--xyz: not an option of run; `tandem run --help` lists them");
  expect_error("run --0123456789012345678901234567890123456789 1", "--help` lists them");
  expect_error("run --nonsense 1", "--nonsense");
  expect_error("run --port 80", "--port");
  expect_error("run -n 0", "n-predict");
  expect_error("run -n 1x", "n-predict");
  expect_error("run --weights stream=", "--weights stream=: give GiB behind =");
  expect_error("run --weights stream=1x", "give GiB behind =");
  expect_error("run --weights mmap=1", "--weights mmap=1: give mmap, resident, auto or stream");
  expect_error("run --temperature -1", "temperature");
  expect_error("run --temperature nan", "temperature");
  expect_error("serve --port 65536", "65535");
  expect_error("serve --port", "--port");
  expect_error("serve --api-key=", "--api-key: the value is empty"); // a shell's unset variable
  expect_error("run --model=", "--model: the value is empty: give DIR");
  assert_int_equal(parse("run --model x --prompt="), TD_OK);
  expect_error("run word", "word");
  expect_error("eval logits --token-ids 1,,2", "entry 2");
  expect_error("eval logits --token-ids 1,2,", "entry 3");
  expect_error("run --raw=maybe", "raw");
  expect_error("run --kv-dtype bf16", "--kv-dtype bf16: give f32, f16 or fp8");
  expect_error("bench kernels --format bf16,bf1", "--format bf1: give f32, bf16, ");
  expect_error("quantize --to int4-g128,fp8", "give int4-g128, int4-g32, fp8 or mxfp4");
  assert_int_equal(parse("quantize --to fp8"), TD_OK);
  assert_string_equal(parsed.to, "fp8");
  expect_error("bench layer --format ,bf16", "nvfp4");
  assert_int_equal(parse("bench kernels --format fp8-b128,bf16"), TD_OK);
  assert_string_equal(parsed.bench_format, "fp8-b128,bf16");
  expect_error("serve --disaggregate split", "give auto, on or off");
  expect_error("serve --workers both", "--disaggregate both");
  expect_error("bench --log yaml", "give text or json");
  assert_int_equal(parse("eval logits --token-ids @/nonexistent"), TD_ENOENT);
}

TEST(former_spellings, NULL, teardown) {
  assert_int_equal(parse("serve --workers split --kv-tokens 512 --stuck-after=7"), TD_OK);
  assert_int_equal(parsed.disaggregate, TD_ON);
  assert_true(parsed.kv_tokens == 512 && parsed.stuck_after_s == 7);
  assert_true(td_options_given(&parsed, "kv-cache-tokens"));
  assert_int_equal(parse("serve --workers one --experts cpu --model-name x"), TD_OK);
  assert_int_equal(parsed.disaggregate, TD_OFF);
  assert_int_equal(parsed.experts, 1);
  assert_string_equal(parsed.model_names.values[0], "x");
  assert_int_equal(parse("bench --slo-itl 5"), TD_OK);
  assert_true(parsed.slo_tpot_ms == 5);
  assert_int_equal(parse("bench kernels --matrices 3"), TD_OK);
  assert_int_equal(parsed.n_matrices, 3);
  td_buf text = TD_BUF_INIT;
  for (int c = 0; c < TD_N_COMMANDS; c++)
    td_options_help(&text, (td_command)c);
  assert_null(strstr(td_buf_text(&text), "--workers"));
  td_buf_free(&text);
}

static td_status parse_with_file(const char *json, const char *rest) {
  char path[] = "/tmp/td_options_XXXXXX", line[256];
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  assert_int_equal(td_file_write(path, json, strlen(json), NULL), TD_OK);
  snprintf(line, sizeof line, "serve --config %s %s", path, rest);
  td_status st = parse(line);
  remove(path);
  return st;
}

TEST(config_file, NULL, teardown) {
  const char *json = "{\"port\": 9000, \"host\": \"::1\", \"prompt\": \"other command's\"}";
  assert_int_equal(parse_with_file(json, "--host 0.0.0.0"), TD_OK);
  assert_int_equal(parsed.port, 9000);
  assert_string_equal(parsed.host, "0.0.0.0");
  assert_true(td_options_given(&parsed, "port"));
  assert_int_equal(parse_with_file("{\"prot\": 9000}", ""), TD_EINVAL);
  assert_non_null(strstr(error.msg, "prot"));
  assert_int_equal(parse_with_file("{\"port\": \"x\"}", ""), TD_EINVAL);
  assert_int_equal(parse_with_file("{\"port\": 70000}", ""), TD_EINVAL);
  assert_int_equal(parse_with_file("[1]", ""), TD_EINVAL);
  assert_int_equal(parse_with_file("{\"kv-dir\": \"\"}", ""), TD_EINVAL);
  assert_int_equal(parse_with_file("{\"workers\": \"one\", \"log\": \"json\"}", ""), TD_OK);
  assert_true(parsed.disaggregate == TD_OFF && parsed.log == TD_LOG_JSON);
  assert_int_equal(parse_with_file("{\"log\": \"yaml\"}", ""), TD_EINVAL);
  assert_int_not_equal(parse_with_file("{", ""), TD_OK);
}

TEST(help_lists_every_command, NULL, teardown) {
  assert_int_equal(parse(""), TD_OK);
  assert_true(parsed.help);
  assert_int_equal(parse("run --help --nonsense"), TD_OK);
  assert_true(parsed.help);
  td_buf text = TD_BUF_INIT;
  td_options_help(&text, TD_N_COMMANDS);
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    char line[128];
    snprintf(line, sizeof line, "\n  %-18s %s\n", td_command_name((td_command)c),
             td_command_summary((td_command)c));
    const char *found = strstr(td_buf_text(&text), line);
    assert_true(found && !strstr(found + 1, line));
  }
  td_buf_free(&text);
}

// Long lists begin with what people change first; each option stands once.
TEST(help_begins_with_what_is_used_most) {
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    td_buf text = TD_BUF_INIT;
    td_options_help(&text, (td_command)c);
    for (size_t i = 0; i < td_n_options; i++) {
      char name[64];
      const td_option *o = &td_option_table[i];
      if (!(o->commands >> c & 1)) continue;
      snprintf(name, sizeof name, o->metavar ? " --%s %s" : " --%s", o->name, o->metavar);
      unsigned n = 0;
      for (const char *at = td_buf_text(&text); (at = strstr(at, name)); at++)
        n += strchr(" \n", at[strlen(name)]) && at[-1] != '`' && (at[-1] == ' ' || at[-1] == ',');
      if (n != 1) fail_msg("%s: %s stands %u times", td_command_name((td_command)c), name, n);
    }
    td_buf_free(&text);
  }
  td_buf serve = TD_BUF_INIT;
  td_options_help(&serve, TD_CMD_SERVE);
  const char *at = td_buf_text(&serve);
  static const char *const order[] = {"Most used:",           "--model ", "--port ", "--ctx-size ",
                                      "Model and placement:", "General:"};
  for (size_t i = 0; i < TD_COUNT(order); i++) {
    at = strstr(at, order[i]);
    assert_non_null(at);
  }
  td_buf_free(&serve);
}

TEST(help_fits_80_columns) {
  td_buf text = TD_BUF_INIT;
  for (int c = 0; c <= TD_N_COMMANDS; c++)
    td_options_help(&text, (td_command)c);
  for (const char *line = td_buf_text(&text); *line;) {
    const size_t len = strcspn(line, "\n");
    if (len > 80) fail_msg("%zu columns: %.*s", len, (int)len, line);
    line += len + 1;
  }
  td_buf_free(&text);
}

// configs/README.md is the reference page; `tandem help --markdown` writes it.
TEST(reference_page_is_current) {
  td_buf page = TD_BUF_INIT, table = TD_BUF_INIT;
  assert_int_equal(td_file_read(&page, TD_TEST_DIR "/../configs/README.md", 1 << 20, &error),
                   TD_OK);
  td_options_reference(&table);
  if (strcmp(td_buf_text(&page), td_buf_text(&table))) {
    fail_msg("configs/README.md is old: build/bin/tandem help --markdown > configs/README.md");
  }
  td_buf_free(&page);
  td_buf_free(&table);
}

static const td_option *option_named(const char *name, td_option_kind kind) {
  for (size_t i = 0; i < td_n_options; i++) {
    const td_option *o = &td_option_table[i];
    if (strcmp(o->name, name) == 0 && o->kind == kind) return o;
  }
  return NULL;
}

static void check_runtime_number(const char *name, double least, double most) {
  const td_option *number = option_named(name, OPT_INT), *choice = option_named(name, OPT_ENUM);
  if (!choice) choice = option_named(name, OPT_SIZED);
  if (!number && !choice) fail_msg("--%s is no option", name);
  if (number && (number->min < least || number->max > most)) fail_msg("--%s: its range", name);
  size_t n = 0;
  while (choice && choice->names[n])
    n++;
  const bool is_dtype = strcmp(name, "kv-dtype") == 0; // of which some are no choice
  if (choice && !(is_dtype ? n <= most + 1 : n == most + 1))
    fail_msg("--%s has %zu names", name, n);
}

// Every runtime option is in the table, and what the table admits a worker accepts.
TEST(runtime_options_are_in_the_table, NULL, teardown) {
#define X(field, option) assert_non_null(option_named(option, OPT_STR));
  TD_RUNTIME_TEXTS(X)
#undef X
#define X(type, field, option, least, most, in_kv) check_runtime_number(option, least, most);
  TD_RUNTIME_NUMBERS(X)
#undef X
  assert_int_equal(parse("run -m dir -t 3 --kv-dtype f16 --expert-device gpu"), TD_OK);
  assert_string_equal(td_options_text(&parsed, "model"), "dir");
  assert_int_equal(td_options_number(&parsed, "threads"), 3);
  assert_int_equal(td_options_number(&parsed, "kv-dtype"), 1);
  assert_int_equal(td_options_number(&parsed, "expert-device"), TD_EXPERTS_GPU);
  assert_int_equal(parse("run -m dir --weights stream=2.5"), TD_OK);
  assert_int_equal(td_options_number(&parsed, "weights"), TD_WEIGHTS_STREAM);
  assert_true(parsed.weights.gib == 2.5);
  assert_int_equal(parse("run -m dir --weights stream"), TD_OK);
  assert_true(parsed.weights.gib == 0);
}
