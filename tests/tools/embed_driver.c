// tests/tools/embed_driver.c - a program that embeds tandem through include/tandem.h alone.
// usage: embed_driver MODEL_DIR MAX_TOKENS MESSAGES_JSON STOP_AFTER_PIECES
// Prints the greedy output, then a line "n_prompt n_reused n_output stopped"; asks twice, so that
// the second request reuses the first one's cache.
#include <stdio.h>
#include <stdlib.h>

#include "tandem.h"

typedef struct {
  int n_pieces, stop_after;
} printer;

static int print_piece(void *ctx, const char *text, size_t len) {
  printer *p = ctx;
  fwrite(text, 1, len, stdout);
  return p->stop_after && ++p->n_pieces >= p->stop_after;
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  char error[512];
  tandem *model;
  if (tandem_open(&model, &(tandem_opts){.model_dir = argv[1]}, error, sizeof error)) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  int status = 0;
  for (int i = 0; i < 2 && !status; i++) {
    printer p = {.stop_after = atoi(argv[4])};
    tandem_request request = {.messages = argv[3],
                              .max_tokens = (uint32_t)atoi(argv[2]),
                              .on_text = print_piece,
                              .ctx = &p};
    tandem_result r;
    status = tandem_generate(model, &request, &r, error, sizeof error);
    printf("\n%u %u %u %d\n", r.n_prompt, r.n_reused, r.n_output, r.stopped);
  }
  if (status) fprintf(stderr, "%s\n", error);
  tandem_close(model);
  return status ? 1 : 0;
}
