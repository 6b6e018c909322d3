// src/cli/spinner.h - shows on stderr, a terminal, that a prefill is running and how far it is.
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

// Zero-initialize. Thread: the functions below are called by one thread; another one draws.
typedef struct {
  bool is_running;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  // under lock
  bool is_done, is_drawn;
  uint32_t n_first, n_done, n_prompt; // tokens; n_first were done at first_s
  double first_s, last_s;
} td_spinner;

// Nothing is drawn within the first 300 ms. Without a thread to draw there is no spinner.
void td_spinner_start(td_spinner *s);
void td_spinner_update(td_spinner *s, uint32_t n_done, uint32_t n_prompt);
// Clears the line. No effect unless started.
void td_spinner_stop(td_spinner *s);
