// src/options/file.c - reads the configuration file given by --config.
#include <string.h>
#include <unistd.h>

#include "base/json_parse.h"
#include "options/options_impl.h"

static td_status ints_of_array(const cJSON *array, td_buf *text) {
  const cJSON *item;
  cJSON_ArrayForEach(item, array) {
    if (!cJSON_IsNumber(item)) return TD_EINVAL;
    td_buf_printf(text, "%s%.17g", text->len ? "," : "", item->valuedouble);
  }
  return TD_OK;
}

static td_status names_of_array(const cJSON *array, td_buf *text) {
  const cJSON *item;
  cJSON_ArrayForEach(item, array) {
    if (!cJSON_IsString(item)) return TD_EINVAL;
    td_buf_printf(text, "%s%s", text->len ? "," : "", item->valuestring);
  }
  return TD_OK;
}

static td_status set_from_json(const td_option *o, td_options *options, const cJSON *item,
                               td_err *err) {
  td_buf text = TD_BUF_INIT;
  bool fits = true;
  if (cJSON_IsString(item)) {
    fits = o->kind == OPT_STR || o->kind == OPT_ENUM || o->kind == OPT_SIZED ||
           o->kind == OPT_INTS || o->kind == OPT_NAMES;
    td_buf_str(&text, item->valuestring);
  } else if (cJSON_IsNumber(item)) {
    fits = o->kind == OPT_INT || o->kind == OPT_REAL || o->kind == OPT_INTS;
    td_buf_printf(&text, "%.17g", item->valuedouble);
  } else if (cJSON_IsBool(item)) {
    fits = o->kind == OPT_FLAG;
    td_buf_str(&text, cJSON_IsTrue(item) ? "true" : "false");
  } else if (o->kind == OPT_NAMES) {
    fits = cJSON_IsArray(item) && names_of_array(item, &text) == TD_OK;
  } else {
    fits = cJSON_IsArray(item) && o->kind == OPT_INTS && ints_of_array(item, &text) == TD_OK;
  }
  td_status st = fits ? td_buf_status(&text, err)
                      : td_fail(err, TD_EINVAL, "\"%s\": the value has the wrong type", o->name);
  if (st == TD_OK) st = td_option_set(o, options, td_buf_text(&text), err);
  td_buf_free(&text);
  return st;
}

td_status td_options_read_file(td_options *options, td_err *err) {
  cJSON *root = NULL;
  td_status st = td_json_parse_file(&root, options->config, 1 << 20, err);
  if (st != TD_OK && access(options->config, F_OK) != 0) {
    return td_fail(err, TD_EINVAL,
                   "--config %s: there is no such file: write options to it as a JSON object, such "
                   "as {\"model\": \"DIR\"}, or copy one of the examples that come with tandem",
                   options->config);
  }
  if (st != TD_OK) return st;
  if (!cJSON_IsObject(root)) st = td_fail(err, TD_EINVAL, "%s: not a JSON object", options->config);
  for (const cJSON *item = root->child; st == TD_OK && item; item = item->next) {
    // A file may be shared by several commands: options of other commands are skipped.
    if (td_option_find(TD_N_COMMANDS, item->string, strlen(item->string), 0) < 0) {
      st = td_fail(err, TD_EINVAL, "%s: \"%s\" is not an option", options->config, item->string);
      break;
    }
    int idx = td_option_find(options->command, item->string, strlen(item->string), 0);
    if (idx < 0 || td_option_is_given(options, (size_t)idx)) continue;
    if (cJSON_IsString(item)) { // the values of an alias may have been renamed
      const char *now = td_option_alias_value(item->string, strlen(item->string),
                                              item->valuestring);
      if (now != item->valuestring) {
        st = td_option_set(&td_option_table[idx], options, now, err);
        td_option_mark_given(options, (size_t)idx);
        continue;
      }
    }
    st = set_from_json(&td_option_table[idx], options, item, err);
    if (st != TD_OK) td_err_prefix(err, "%s", options->config);
    td_option_mark_given(options, (size_t)idx);
  }
  cJSON_Delete(root);
  return st;
}
