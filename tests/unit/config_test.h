// tests/unit/config_test.h - parses a config.json that a test spells out.
#pragma once

#include <stdio.h>
#include <string.h>

#include "model/config.h"
#include "unit/testing.h"

static inline td_status parse(const char *config, const char *generation, td_model_config *out,
                              td_err *err) {
  cJSON *c = cJSON_Parse(config), *g = generation ? cJSON_Parse(generation) : NULL;
  if (!c || (generation && !g)) {
    fail_msg("test is not JSON: %s %s", config, generation ? generation : "-");
  }
  td_status st = td_config_parse(out, c, g, "dir", err);
  cJSON_Delete(c);
  cJSON_Delete(g);
  return st;
}

static inline td_model_config parse_ok(const char *config, const char *generation) {
  td_model_config c;
  td_err err;
  if (parse(config, generation, &c, &err) != TD_OK) fail_msg("%s: %s", config, err.msg);
  return c;
}

typedef struct {
  const char *keys; // of config.json besides model_type
  td_status status;
  const char *says;
} refusal;

static inline void check_refusals(const char *model_type, const refusal *cases, size_t n) {
  for (size_t i = 0; i < n; i++) {
    char text[1024];
    snprintf(text, sizeof text, "{\"model_type\": \"%s\", %s}", model_type, cases[i].keys);
    td_model_config c;
    td_err err;
    td_status st = parse(text, NULL, &c, &err);
    if (st != cases[i].status || !strstr(err.msg, cases[i].says) ||
        strncmp(err.msg, "dir/config.json: ", 17) != 0) {
      fail_msg("%s: status %d, message %s", text, st, st == TD_OK ? "" : err.msg);
    }
    assert_int_equal(parse(text, NULL, &c, NULL), cases[i].status);
  }
}
