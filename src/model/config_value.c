// src/model/config_value.c - reads typed values with range checks.
#include "model/config.h"

// Turns an error of a value into TD_EFORMAT, prefixed with the file name.
static td_status refuse(const td_config_reader *r) {
  td_err_prefix(r->err, "%s", r->file);
  return r->err->code = TD_EFORMAT;
}

// In config.json null means "default" to some readers and None to others. It is rejected where None
// has no meaning.
static bool is_null(const cJSON *object, const char *key) {
  return cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(object, key));
}

static td_status refuse_null(const td_config_reader *r, const char *key) {
  return td_config_fail(r, TD_EFORMAT, "%s must not be null", key);
}

td_status td_config_uint(const td_config_reader *r, const cJSON *object, const char *key,
                         uint32_t min, uint32_t max, uint32_t *out) {
  if (is_null(object, key)) return refuse_null(r, key);
  int64_t value = *out;
  if (td_json_get_int(object, key, min, max, &value, r->err) != TD_OK) return refuse(r);
  *out = (uint32_t)value;
  return TD_OK;
}

td_status td_config_double(const td_config_reader *r, const cJSON *object, const char *key,
                           double min, double max, double *out) {
  if (is_null(object, key)) return refuse_null(r, key);
  double value = *out;
  if (td_json_get_double(object, key, &value, r->err) != TD_OK) return refuse(r);
  if (td_json_get(object, key) && !(value >= min && value <= max)) {
    return td_config_fail(r, TD_EFORMAT, "%s is %g, must be between %g and %g", key, value, min,
                          max);
  }
  *out = value;
  return TD_OK;
}

td_status td_config_bool(const td_config_reader *r, const cJSON *object, const char *key,
                         bool *out) {
  if (is_null(object, key)) return refuse_null(r, key);
  return td_json_get_bool(object, key, out, r->err) == TD_OK ? TD_OK : refuse(r);
}

td_status td_config_str(const td_config_reader *r, const cJSON *object, const char *key,
                        const char **out) {
  if (is_null(object, key)) return refuse_null(r, key);
  return td_json_get_str(object, key, out, r->err) == TD_OK ? TD_OK : refuse(r);
}
