// tests/fuzz/schema_maker.h - a JSON schema from any bytes, with a value that it allows, in the
// white space of a grammar.
#pragma once

#include <stdint.h>
#include <string.h>

#include "base/buf.h"

enum { MAKER_DEPTH = 4, MAKER_BYTES = 256 };

typedef struct {
  const uint8_t *data;
  size_t n;
  td_buf schema, value, defs;
  unsigned n_defs;
} schema_maker;

// 0 to n - 1; 0 once the bytes are used up.
static unsigned draw(schema_maker *m, unsigned n) {
  if (!m->n) return 0;
  m->n--;
  return *m->data++ % n;
}

// Takes back the end of a value.
static void cut_value(schema_maker *m, size_t len) {
  m->value.len = len;
  if (m->value.data) m->value.data[len] = '\0';
}

static void make_schema(schema_maker *m, unsigned depth);

// A string of 0 to 3 characters, of which some are escaped, and its bounds.
static void make_string(schema_maker *m) {
  static const char *const chars[] = {"a", "Z", "\xC3\xA9", "\\\"", "\\n", " ", "\\u00e9", "{"};
  const unsigned n = draw(m, 4), min = draw(m, n + 1);
  td_buf_printf(&m->schema, "{\"type\":\"string\",\"minLength\":%u,\"maxLength\":%u}", min,
                n + draw(m, 3));
  td_buf_char(&m->value, '"');
  for (unsigned i = 0; i < n; i++)
    td_buf_str(&m->value, chars[draw(m, TD_COUNT(chars))]);
  td_buf_char(&m->value, '"');
}

static void make_integer(schema_maker *m) {
  const int min = (int)draw(m, 200) - 100, span = (int)draw(m, 250);
  td_buf_printf(&m->schema, "{\"type\":\"integer\",\"minimum\":%d,\"maximum\":%d}", min,
                min + span);
  td_buf_printf(&m->value, "%d", min + (int)draw(m, (unsigned)span + 1));
}

static void make_scalar(schema_maker *m) {
  static const struct {
    const char *schema, *value;
  } scalars[] = {{"{\"type\":\"null\"}", "null"},
                 {"{\"type\":\"boolean\"}", "true"},
                 {"{\"type\":\"number\"}", "-12.5"},
                 {"{\"enum\":[1,\"b\",null]}", "\"b\""},
                 {"{\"const\":\"c\\\"\"}", "\"c\\\"\""},
                 {"{\"type\":\"string\",\"pattern\":\"^[a-c]{1,3}x?$\"}", "\"abx\""},
                 {"{\"type\":[\"string\",\"null\"]}", "null"},
                 {"{\"type\":\"string\",\"format\":\"date\"}", "\"2024-02-28\""},
                 {"true", "{\"any\": [1, 2]}"}};
  const unsigned i = draw(m, TD_COUNT(scalars) + 2);
  if (i == TD_COUNT(scalars)) {
    make_string(m);
  } else if (i > TD_COUNT(scalars)) {
    make_integer(m);
  } else {
    td_buf_str(&m->schema, scalars[i].schema);
    td_buf_str(&m->value, scalars[i].value);
  }
}

// Equal items, or a tuple of any.
static void make_array(schema_maker *m, unsigned depth) {
  const unsigned n = draw(m, 3), n_more = draw(m, 2);
  const bool is_tuple = draw(m, 2) && n;
  td_buf_printf(&m->schema, "{\"type\":\"array\",\"%s", is_tuple ? "prefixItems\":[" : "items\":");
  td_buf_char(&m->value, '[');
  const size_t begin = m->value.len;
  for (unsigned i = 0; i < (is_tuple ? n : 1); i++) {
    if (i) td_buf_str(&m->schema, ",");
    if (i) td_buf_str(&m->value, ", ");
    make_schema(m, depth + 1);
  }
  if (is_tuple) {
    td_buf_printf(&m->schema, "],\"items\":false,\"minItems\":%u}", n);
  } else {
    td_buf item = TD_BUF_INIT;
    td_buf_add(&item, m->value.data + begin, m->value.len - begin);
    cut_value(m, begin);
    for (unsigned i = 0; i < n; i++)
      td_buf_printf(&m->value, "%s%s", i ? ", " : "", td_buf_text(&item));
    td_buf_printf(&m->schema, ",\"minItems\":%u,\"maxItems\":%u}", n, n + n_more);
    td_buf_free(&item);
  }
  td_buf_char(&m->value, ']');
}

// Members that are required are in the value, and some of the others.
static void make_object(schema_maker *m, unsigned depth) {
  const unsigned n = draw(m, 4);
  td_buf required = TD_BUF_INIT;
  unsigned n_members = 0;
  td_buf_str(&m->schema, "{\"type\":\"object\",\"properties\":{");
  td_buf_char(&m->value, '{');
  for (unsigned i = 0; i < n; i++) {
    const bool is_required = draw(m, 2), is_there = is_required || draw(m, 2);
    const size_t before = m->value.len;
    td_buf_printf(&m->schema, "%s\"k%u\":", i ? "," : "", i);
    td_buf_printf(&m->value, "%s\"k%u\": ", n_members ? ", " : "", i);
    make_schema(m, depth + 1);
    if (is_required) td_buf_printf(&required, "%s\"k%u\"", required.len ? "," : "", i);
    if (is_there) n_members++;
    if (!is_there) cut_value(m, before);
  }
  td_buf_printf(&m->schema, "},\"required\":[%s],\"additionalProperties\":false}",
                td_buf_text(&required));
  td_buf_char(&m->value, '}');
  td_buf_free(&required);
}

// A map, alternatives, or a definition.
static void make_other(schema_maker *m, unsigned depth, unsigned kind) {
  if (kind == 0) {
    td_buf_str(&m->schema, "{\"type\":\"object\",\"additionalProperties\":");
    td_buf_str(&m->value, "{\"key\": ");
    make_schema(m, depth + 1);
    td_buf_char(&m->value, '}');
    td_buf_char(&m->schema, '}');
  } else if (kind == 1) {
    const unsigned n = 1 + draw(m, 3), chosen = draw(m, n);
    td_buf_str(&m->schema, "{\"anyOf\":[");
    for (unsigned i = 0; i < n; i++) {
      const size_t before = m->value.len;
      if (i) td_buf_char(&m->schema, ',');
      make_schema(m, depth + 1);
      if (i != chosen) cut_value(m, before);
    }
    td_buf_str(&m->schema, "]}");
  } else {
    td_buf outer = m->schema;
    m->schema = (td_buf)TD_BUF_INIT;
    make_schema(m, depth + 1);
    td_buf_printf(&m->defs, "%s\"d%u\":%s", m->n_defs ? "," : "", m->n_defs,
                  td_buf_text(&m->schema));
    td_buf_free(&m->schema);
    m->schema = outer;
    td_buf_printf(&m->schema, "{\"$ref\":\"#/$defs/d%u\"}", m->n_defs++);
  }
}

// Appends a schema, and a value of it.
static void make_schema(schema_maker *m, unsigned depth) {
  const unsigned kind = depth < MAKER_DEPTH ? draw(m, 8) : 7;
  if (kind < 2) {
    make_object(m, depth);
  } else if (kind < 4) {
    make_array(m, depth);
  } else if (kind < 7) {
    make_other(m, depth, kind - 4);
  } else {
    make_scalar(m);
  }
}

// Makes both of up to MAKER_BYTES bytes; what reads them frees them.
static void make_root(td_buf *schema, td_buf *value, const uint8_t *data, size_t n) {
  schema_maker m = {.data = data, .n = n < MAKER_BYTES ? n : MAKER_BYTES};
  make_schema(&m, 0);
  td_buf_printf(
      schema,
      "{\"$defs\":{%s},\"type\":\"object\",\"properties\":{\"v\":%s},\"required\":[\"v\"],"
      "\"additionalProperties\":false}",
      td_buf_text(&m.defs), td_buf_text(&m.schema));
  td_buf_printf(value, "{\"v\": %s}", td_buf_text(&m.value));
  td_buf_free(&m.defs);
  td_buf_free(&m.schema);
  td_buf_free(&m.value);
}
