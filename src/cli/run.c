// src/cli/run.c - `tandem run`: generates one response, or chats on a terminal.
// Only the response goes to stdout; progress and timings go to stderr.
#include <float.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/json_write.h"
#include "base/log.h"
#include "base/printable.h"
#include "cli/cli.h"
#include "runtime/command.h"
#include "runtime/session.h"
#include "runtime/trace_file.h"
#include "text/chat.h"

#define MAX_TEXT_BYTES (1u << 28)

// Set by Ctrl-C, checked between tokens.
static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number) {
  (void)signal_number;
  interrupted = 1;
}

typedef struct {
  const td_options *options;
  td_session *session;
  td_trace_file *trace; // NULL without --trace
  td_chat *chat;
  td_sampling sampling;
  bool show_progress; // stderr is a terminal
  td_buf history;     // the conversation so far: elements of "messages" as JSON objects, separated
                      // by commas
  // the response being generated
  td_detok detok;
  td_buf answer;    // text
  td_token_ids ids; // its tokens
  size_t n_shown;
  td_status status; // of decoding its tokens; err if not TD_OK
  td_err err;
} runner;

// ---- sampling parameters --------------------------------------------------------------------

// The user's options take precedence over generation_config.json.
static td_sampling choose_sampling(const td_options *o, const td_model_config *config) {
  td_sampling s = {.temperature = (float)o->temperature,
                   .top_p = (float)o->top_p,
                   .min_p = (float)o->min_p,
                   .repetition_penalty = (float)o->repetition_penalty,
                   .presence_penalty = (float)o->presence_penalty,
                   .frequency_penalty = (float)o->frequency_penalty,
                   .top_k = (uint32_t)o->top_k,
                   .seed = (uint64_t)o->seed};
  if (!td_options_given(o, "temperature")) s.temperature = config->temperature;
  if (!td_options_given(o, "top-p")) s.top_p = config->top_p;
  if (!td_options_given(o, "top-k")) s.top_k = config->top_k_sampling;
  if (s.top_p == 0) s.top_p = FLT_MIN; // greedy: 0 would disable top_p instead
  if (!td_options_given(o, "seed") && getrandom(&s.seed, sizeof s.seed, 0) < 0) s.seed = 0;
  return s;
}

// ---- one response ---------------------------------------------------------------------------

static bool show_prefill(void *ctx, uint32_t n_done, uint32_t n_prompt) {
  const runner *r = ctx;
  if (r->show_progress && n_prompt > r->session->opts.runtime.prefill_chunk) {
    fprintf(stderr, "\rprefill: %u of %u tokens%s", n_done, n_prompt,
            n_done == n_prompt ? "\r\033[K" : "");
  }
  return !interrupted;
}

static void show_answer(runner *r) {
  if (!r->options->json) {
    fwrite(td_buf_text(&r->answer) + r->n_shown, 1, r->answer.len - r->n_shown, stdout);
    fflush(stdout);
  }
  r->n_shown = r->answer.len;
}

static bool show_token(void *ctx, int32_t id) {
  runner *r = ctx;
  r->status = td_token_ids_push(&r->ids, id, &r->err);
  if (r->status == TD_OK && r->chat) {
    r->status = td_detok_feed(&r->detok, id, &r->answer, &r->err);
  } else if (r->status == TD_OK) { // without a tokenizer print ids
    td_buf_printf(&r->answer, "%s%d", r->answer.len ? "," : "", id);
    r->status = td_buf_status(&r->answer, &r->err);
  }
  if (r->status != TD_OK) return false;
  show_answer(r);
  return !interrupted && !ferror(stdout);
}

static double per_second(double n, double seconds) {
  return seconds > 0 ? n / seconds : 0;
}

static void report(const runner *r, const td_generate_stats *stats) {
  uint32_t n_read = stats->n_prompt - stats->n_reused;
  uint32_t n_steps = stats->n_output ? stats->n_output - 1 : 0;
  double decode = per_second(n_steps, stats->decode_s);
  double bytes = (double)td_model_stats_of(r->session->model).active_bytes;
  td_info("load %.2f s | prefill %u tokens, %.1f tokens/s | decode %u tokens, %.2f tokens/s, "
          "%.2f GB/s of weights",
          r->session->load_s, n_read, per_second(n_read, stats->prefill_s), stats->n_output, decode,
          decode * bytes * 1e-9);
}

static const char *reason_name(td_done_reason reason) {
  switch (reason) {
  case TD_DONE_STOP: return "stop";
  case TD_DONE_LENGTH: return "length";
  case TD_DONE_CANCELED: return "canceled";
  case TD_DONE_ERROR:
  case TD_DONE_PREFILLED:
  case TD_DONE_LOST: break;
  }
  return "error";
}

static td_status print_json(const runner *r, const td_generate_stats *stats, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_begin_object(&w, NULL);
  if (r->chat) td_jw_str_len(&w, "text", td_buf_text(&r->answer), r->answer.len);
  td_jw_begin_array(&w, "token_ids");
  for (size_t i = 0; i < r->ids.n; i++)
    td_jw_int(&w, NULL, r->ids.ids[i]);
  td_jw_end_array(&w);
  td_jw_str(&w, "finish_reason", reason_name(stats->reason));
  td_jw_int(&w, "n_prompt", stats->n_prompt);
  td_jw_int(&w, "n_output", stats->n_output);
  td_jw_double(&w, "load_s", r->session->load_s);
  td_jw_double(&w, "prefill_s", stats->prefill_s);
  td_jw_double(&w, "decode_s", stats->decode_s);
  td_jw_end_object(&w);
  td_status st = td_buf_status(&text, err);
  if (st == TD_OK) puts(td_buf_text(&text));
  fflush(stdout);
  td_buf_free(&text);
  return st;
}

static td_status answer(runner *r, const int32_t *prompt, size_t n_prompt, td_err *err) {
  td_buf_clear(&r->answer);
  r->ids.n = r->n_shown = 0;
  r->status = TD_OK;
  td_generate_args args = {.prompt = prompt,
                           .n_prompt = (uint32_t)n_prompt,
                           .max_tokens = (uint32_t)r->options->n_predict,
                           .ignore_eos = r->options->ignore_eos,
                           .tok = r->chat ? td_chat_tokenizer(r->chat) : NULL,
                           .sampling = r->sampling,
                           .on_prefill = show_prefill,
                           .on_token = show_token,
                           .ctx = r};
  td_generate_stats stats;
  td_status st = td_session_generate(r->session, &args, &stats, err);
  if (st == TD_OK && r->status != TD_OK) {
    *err = r->err;
    st = r->status;
  }
  if (st != TD_OK) return st;
  if (r->chat) st = td_detok_flush(&r->detok, &r->answer, err);
  show_answer(r);
  if (!r->options->json) {
    putchar('\n');
  } else if (st == TD_OK) {
    st = print_json(r, &stats, err);
  }
  report(r, &stats);
  return st;
}

// ---- prompts --------------------------------------------------------------------------------

static void add_message(td_buf *messages, const char *role, const char *text, size_t len) {
  td_json_writer w = TD_JSON_WRITER(messages);
  if (messages->len) td_buf_char(messages, ',');
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "role", role);
  td_jw_str_len(&w, "content", text, len);
  td_jw_end_object(&w);
}

static td_status encode_history(const runner *r, td_token_ids *ids, td_err *err) {
  td_buf vars = TD_BUF_INIT;
  td_buf_printf(&vars, "{\"messages\":[%s],\"add_generation_prompt\":true}",
                td_buf_text(&r->history));
  td_status st = td_buf_status(&r->history, err);
  if (st == TD_OK) st = td_buf_status(&vars, err);
  if (st == TD_OK) st = td_chat_encode(r->chat, td_buf_text(&vars), vars.len, ids, NULL, err);
  td_buf_free(&vars);
  return st;
}

// Generates a response to the conversation and appends it.
static td_status answer_chat(runner *r, td_err *err) {
  td_token_ids ids = {0};
  td_status st = encode_history(r, &ids, err);
  if (st == TD_OK) st = answer(r, ids.ids, ids.n, err);
  if (st == TD_OK) {
    add_message(&r->history, "assistant", td_buf_text(&r->answer), r->answer.len);
    st = td_buf_status(&r->history, err);
  }
  td_token_ids_free(&ids);
  return st;
}

static td_status answer_text(runner *r, const char *text, size_t len, td_err *err) {
  if (!r->options->raw) {
    add_message(&r->history, "user", text, len);
    return answer_chat(r, err);
  }
  td_token_ids ids = {0};
  td_status st = td_chat_encode_plain(r->chat, text, len, true, &ids, err);
  if (st == TD_OK) st = answer(r, ids.ids, ids.n, err);
  td_token_ids_free(&ids);
  return st;
}

// Reads the single prompt: --prompt, --file, or stdin if that is not a terminal.
static td_status read_prompt(const td_options *o, td_buf *text, td_err *err) {
  if (o->prompt) {
    td_buf_str(text, o->prompt);
  } else if (o->file && strcmp(o->file, "-")) {
    return td_file_read(text, o->file, MAX_TEXT_BYTES, err);
  } else {
    return td_stdin_read(text, MAX_TEXT_BYTES, err);
  }
  return td_buf_status(text, err);
}

static td_status run_once(runner *r, td_err *err) {
  const td_options *o = r->options;
  if (o->token_ids.n) return answer(r, o->token_ids.values, o->token_ids.n, err);
  td_buf text = TD_BUF_INIT;
  td_status st = read_prompt(o, &text, err);
  if (st == TD_OK) st = answer_text(r, td_buf_text(&text), text.len, err);
  td_buf_free(&text);
  return st;
}

// Waits for a line or the end of input on the terminal; false if Ctrl-C came first. The signal is
// unblocked only inside ppoll, so none is lost before the wait.
static bool wait_for_line(void) {
  sigset_t interrupt, before;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  sigprocmask(SIG_BLOCK, &interrupt, &before);
  struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
  if (!interrupted) ppoll(&input, 1, NULL, &before);
  sigprocmask(SIG_SETMASK, &before, NULL);
  return !interrupted;
}

static void print_name(const runner *r) {
  td_buf name = TD_BUF_INIT;
  const char *given = td_model_name(r->session->model);
  td_printable_add(&name, given, strlen(given), "");
  fprintf(stderr, "%s. Ctrl-C stops a response, Ctrl-D ends.\n", td_buf_text(&name));
  td_buf_free(&name);
}

// Reads lines until the end of input. An error in one turn does not end the chat. At the prompt
// Ctrl-C discards the line and Ctrl-D ends the chat.
static td_status chat_on_terminal(runner *r, td_err *err) {
  char *line = NULL;
  size_t cap = 0;
  print_name(r);
  setvbuf(stdin, NULL, _IONBF, 0); // unbuffered, so that poll sees all unread input
  for (;;) {
    interrupted = 0;
    fputs("\n> ", stderr);
    if (!wait_for_line()) continue;
    ssize_t len = getline(&line, &cap, stdin);
    if (len < 0) break;
    while (len > 0 && (line[len - 1] == '\n' || line[len - 1] == '\r'))
      len--;
    if (!len) continue;
    size_t mark = r->history.len;
    if (answer_text(r, line, (size_t)len, err) != TD_OK) {
      td_error("%s", err->msg);
      r->history.len = mark;
      r->history.failed = false;
    }
  }
  fputc('\n', stderr);
  free(line);
  return TD_OK;
}

static td_status open_runner(runner *r, td_err *err) {
  const td_options *o = r->options;
  td_session_opts opts;
  td_status st = td_cmd_session_opts(o, &opts, err);
  if (st != TD_OK) return st;
  if (o->trace) st = td_trace_file_open(&r->trace, o->trace, "run", err);
  if (st != TD_OK) return st;
  if (!o->token_ids.n) st = td_chat_open(&r->chat, o->model, err);
  if (st != TD_OK) return st;
  st = td_session_open(&r->session, &opts, err);
  if (st != TD_OK) return st;
  r->sampling = choose_sampling(o, r->session->config);
  if (r->chat) td_detok_init(&r->detok, td_chat_tokenizer(r->chat), true);
  if (o->system) add_message(&r->history, "system", o->system, strlen(o->system));
  return TD_OK;
}

static void close_runner(runner *r) {
  if (r->chat) td_detok_free(&r->detok);
  td_buf_free(&r->history);
  td_buf_free(&r->answer);
  td_token_ids_free(&r->ids);
  td_session_close(r->session);
  td_trace_file_close(r->trace);
  td_chat_close(r->chat);
}

int td_cmd_run(const td_options *o) {
  runner r = {.options = o, .show_progress = isatty(STDERR_FILENO)};
  td_err err;
  td_status st = open_runner(&r, &err);
  if (st == TD_OK) {
    struct sigaction action = {.sa_handler = on_interrupt};
    sigaction(SIGINT, &action, NULL);
    bool one = o->prompt || o->file || o->token_ids.n || !isatty(STDIN_FILENO);
    st = one ? run_once(&r, &err) : chat_on_terminal(&r, &err);
    if (st == TD_OK && one && interrupted) {
      close_runner(&r);
      return 130;
    }
  }
  close_runner(&r);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
