// tests/unit/api_request_testing.h - bodies of requests, and what they are parsed with.
#pragma once

#include <stdio.h>
#include <string.h>

#include "api/request.h"
#include "unit/testing.h"

static const td_api_defaults defaults = {
    .temperature = 0.5f, .top_p = 0.75f, .top_k = 20, .n_vocab = 1000};

#define HELLO        "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define WITH(member) "{" HELLO "," member "}"
#define TOOL         "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"

static inline td_status parse(td_api_request *r, bool chat, const char *body, td_api_error *error) {
  return (chat ? td_api_parse_chat : td_api_parse_completion)(r, body, strlen(body), &defaults,
                                                              error);
}

static inline td_api_request good(bool chat, const char *body) {
  td_api_request r;
  td_api_error error;
  if (parse(&r, chat, body, &error) != TD_OK) fail_msg("%s\n%s", body, error.message);
  return r;
}
