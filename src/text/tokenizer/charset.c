// src/text/tokenizer/charset.c - set operations on character classes.
#include "text/tokenizer/charset.h"

#include <stdlib.h>
#include <string.h>

#define MAX_CODE 0x10FFFFu

// General categories with their long names, in loose spelling (no case, spaces, _ or -).
static const struct {
  char name[3];
  const char *long_name;
} categories[] = {
    {"Lu", "uppercaseletter"},    {"Ll", "lowercaseletter"},  {"Lt", "titlecaseletter"},
    {"Lm", "modifierletter"},     {"Lo", "otherletter"},      {"Mn", "nonspacingmark"},
    {"Mc", "spacingmark"},        {"Me", "enclosingmark"},    {"Nd", "decimalnumber"},
    {"Nl", "letternumber"},       {"No", "othernumber"},      {"Pc", "connectorpunctuation"},
    {"Pd", "dashpunctuation"},    {"Ps", "openpunctuation"},  {"Pe", "closepunctuation"},
    {"Pi", "initialpunctuation"}, {"Pf", "finalpunctuation"}, {"Po", "otherpunctuation"},
    {"Sm", "mathsymbol"},         {"Sc", "currencysymbol"},   {"Sk", "modifiersymbol"},
    {"So", "othersymbol"},        {"Zs", "spaceseparator"},   {"Zl", "lineseparator"},
    {"Zp", "paragraphseparator"}, {"Cc", "control"},          {"Cf", "format"},
    {"Cn", "unassigned"},         {"Co", "privateuse"},       {"Cs", "surrogate"},
};

// All categories together contain every code point.
#define ALL_CATEGORIES ((1u << TD_COUNT(categories)) - 1)

static const struct {
  char letter;
  const char *long_name;
} groups[] = {
    {'L', "letter"}, {'M', "mark"},      {'N', "number"}, {'P', "punctuation"},
    {'S', "symbol"}, {'Z', "separator"}, {'C', "other"},
};

// Other names known to Oniguruma: combinations of categories, ranges terminated by zero, and
// properties for which PCRE2's Unicode version suffices.
static const struct {
  const char *name;
  const char *categories; // concatenated short names
  uint32_t ranges[24];
  const char *property;
} others[] = {
    {"lc", "LuLlLt", {0}, NULL},
    {"casedletter", "LuLlLt", {0}, NULL},
    {"digit", "Nd", {0}, NULL},
    {"cntrl", "Cc", {0}, NULL},
    {"blank", "Zs", {9, 9}, NULL},
    {"punct", "PcPdPsPePiPfPo", {0}, NULL},
    {"posixpunct", "PcPdPsPePiPfPoSmScSkSo", {0}, NULL},
    {"space",
     "",
     {9,      13,     ' ',    ' ',    0x85,   0x85,   0xA0,   0xA0,   0x1680, 0x1680,
      0x2000, 0x200A, 0x2028, 0x2029, 0x202F, 0x202F, 0x205F, 0x205F, 0x3000, 0x3000},
     NULL},
    {"xdigit", "", {'0', '9', 'A', 'F', 'a', 'f'}, NULL},
    {"any", "", {1, MAX_CODE}, NULL},
    {"word", "NdMnMcMePc", {0}, "\\p{Alphabetic}"},
    {"alnum", "Nd", {0}, "\\p{Alphabetic}"},
    {"alpha", "", {0}, "\\p{Alphabetic}"},
    {"alphabetic", "", {0}, "\\p{Alphabetic}"},
    {"upper", "", {0}, "\\p{Uppercase}"},
    {"uppercase", "", {0}, "\\p{Uppercase}"},
    {"lower", "", {0}, "\\p{Lowercase}"},
    {"lowercase", "", {0}, "\\p{Lowercase}"},
    {"emoji", "", {0}, "\\p{Emoji}"},
    {"emojipresentation", "", {0}, "\\p{Emoji_Presentation}"},
    {"extendedpictographic", "", {0}, "\\p{Extended_Pictographic}"},
    {"ideographic", "", {0}, "\\p{Ideographic}"},
};

void td_charset_free(td_charset *set) {
  td_runes_free(&set->ranges);
  td_buf_free(&set->properties);
  *set = (td_charset){0};
}

td_status td_charset_add_range(td_charset *set, uint32_t first, uint32_t last, td_err *err) {
  return td_runes_add(&set->ranges, (uint32_t[]){first, last}, 2, err);
}

static uint32_t category_bit(const char *name) {
  for (size_t i = 0; i < TD_COUNT(categories); i++)
    if (strncmp(categories[i].name, name, 2) == 0) return 1u << i;
  return 0;
}

static uint32_t group_bits(char letter) {
  uint32_t bits = 0;
  for (size_t i = 0; i < TD_COUNT(categories); i++)
    if (categories[i].name[0] == letter) bits |= 1u << i;
  return bits;
}

// Mask of the categories or groups with that short or long name, in loose spelling; 0 if unknown.
static uint32_t named_categories(const char *loose) {
  for (size_t i = 0; i < TD_COUNT(groups); i++) {
    bool short_name = (loose[0] ^ 0x20) == groups[i].letter && !loose[1];
    if (short_name || strcmp(loose, groups[i].long_name) == 0) return group_bits(groups[i].letter);
  }
  for (size_t i = 0; i < TD_COUNT(categories); i++) {
    const char *name = categories[i].name;
    bool short_name = (loose[0] ^ 0x20) == name[0] && loose[1] == name[1] && !loose[2];
    if (short_name || strcmp(loose, categories[i].long_name) == 0) return 1u << i;
  }
  return 0;
}

static bool add_other(td_charset *set, size_t which, td_err *err) {
  for (const char *name = others[which].categories; *name; name += 2)
    set->categories |= category_bit(name);
  for (const uint32_t *range = others[which].ranges; *range; range += 2) {
    uint32_t first = *range == 1 ? 0 : *range;
    if (td_charset_add_range(set, first, range[1], err) != TD_OK) return false;
  }
  if (others[which].property) td_buf_str(&set->properties, others[which].property);
  return true;
}

bool td_charset_add_property(td_charset *set, const char *name, size_t len, td_err *err) {
  char loose[64];
  size_t n = 0;
  bool is_word = true;
  for (size_t i = 0; i < len; i++) {
    char c = name[i];
    if (c == ' ' || c == '_' || c == '-') continue;
    if (c >= 'A' && c <= 'Z') c |= 0x20;
    is_word = is_word && c >= 'a' && c <= 'z';
    if (!is_word || n + 1 == sizeof loose) break;
    loose[n++] = c;
  }
  loose[n] = '\0';
  td_fail(err, TD_EUNSUPPORTED, "unknown property \"%.*s\"", len < 40 ? (int)len : 40, name);
  if (!is_word || !n || n + 1 == sizeof loose) return false;
  uint32_t bits = named_categories(loose);
  set->categories |= bits;
  if (bits) return true;
  for (size_t i = 0; i < TD_COUNT(others); i++)
    if (strcmp(loose, others[i].name) == 0) return add_other(set, i, err);
  td_buf_printf(&set->properties, "\\p{sc:%s}", loose);
  return true;
}

bool td_charset_add_escape(td_charset *set, char letter, td_err *err) {
  const char *name = letter == 's' ? "space" : letter == 'd' ? "digit" : "word";
  if (letter == 'h') name = "xdigit";
  return td_charset_add_property(set, name, strlen(name), err);
}

static int by_first(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return x < y ? -1 : x > y;
}

// Replaces ranges by their complement.
static td_status complement_ranges(td_runes *ranges, td_err *err) {
  td_runes gaps = {0};
  td_status st = TD_OK;
  uint32_t next = 0;
  if (ranges->n) qsort(ranges->r, ranges->n / 2, 2 * sizeof *ranges->r, by_first);
  for (size_t i = 0; i < ranges->n && st == TD_OK; i += 2) {
    if (ranges->r[i] > next) st = td_runes_add(&gaps, (uint32_t[]){next, ranges->r[i] - 1}, 2, err);
    if (ranges->r[i + 1] >= next) next = ranges->r[i + 1] + 1;
  }
  if (st == TD_OK && next <= MAX_CODE)
    st = td_runes_add(&gaps, (uint32_t[]){next, MAX_CODE}, 2, err);
  td_runes_free(ranges);
  *ranges = gaps;
  return st;
}

// Turns a set with a single kind of elements into a union.
static bool make_union(td_charset *set, td_err *err) {
  if (!set->negated) return true;
  if (set->properties.len || (set->categories && set->ranges.n)) return false;
  set->negated = false;
  if (set->categories) {
    set->categories = ALL_CATEGORIES & ~set->categories;
    return true;
  }
  return complement_ranges(&set->ranges, err) == TD_OK;
}

static bool is_empty(const td_charset *set) {
  return !set->negated && !set->categories && !set->ranges.n && !set->properties.len;
}

bool td_charset_unite(td_charset *set, td_charset *other, td_err *err) {
  if (is_empty(set)) {
    td_charset swap = *set;
    *set = *other;
    *other = swap;
    return true;
  }
  if (is_empty(other)) return true;
  td_fail(err, TD_EUNSUPPORTED, "a class too complex to translate");
  if (!make_union(set, err) || !make_union(other, err)) return false;
  set->categories |= other->categories;
  td_buf_add(&set->properties, td_buf_text(&other->properties), other->properties.len);
  return td_runes_add(&set->ranges, other->ranges.r, other->ranges.n, err) == TD_OK;
}

// De Morgan: a AND b = NOT (NOT a OR NOT b).
bool td_charset_intersect(td_charset *set, td_charset *other, td_err *err) {
  set->negated = !set->negated;
  other->negated = !other->negated;
  bool ok = td_charset_unite(set, other, err);
  set->negated = !set->negated;
  other->negated = !other->negated;
  return ok;
}

void td_charset_write(const td_charset *set, td_buf *out) {
  if (!set->categories && !set->ranges.n && !set->properties.len) {
    td_buf_str(out, set->negated ? "(?s:.)" : "(?!)");
    return;
  }
  td_buf_str(out, set->negated ? "[^" : "[");
  for (size_t i = 0; i + 1 < set->ranges.n; i += 2) {
    td_buf_printf(out, "\\x{%x}", set->ranges.r[i]);
    if (set->ranges.r[i + 1] != set->ranges.r[i])
      td_buf_printf(out, "-\\x{%x}", set->ranges.r[i + 1]);
  }
  uint32_t left = set->categories;
  for (size_t i = 0; i < TD_COUNT(groups); i++) {
    uint32_t bits = group_bits(groups[i].letter);
    if ((left & bits) != bits) continue;
    td_buf_printf(out, "\\p{%c}", groups[i].letter);
    left &= ~bits;
  }
  for (size_t i = 0; i < TD_COUNT(categories); i++)
    if (left & 1u << i) td_buf_printf(out, "\\p{%s}", categories[i].name);
  td_buf_add(out, td_buf_text(&set->properties), set->properties.len);
  td_buf_char(out, ']');
}
