// src/text/tokenizer/pre_tokenizer.h - the "pre_tokenizer" of tokenizer.json: splits text into
// words. Private to text/.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "text/tokenizer/regex.h"

typedef struct td_split td_split;
typedef struct td_split_scratch td_split_scratch; // working memory for one call at a time

// Supports Split, ByteLevel, Digits, Metaspace, Punctuation, Whitespace, WhitespaceSplit, and
// Sequences of them. json may be NULL: texts are not split.
td_status td_split_open(td_split **out, const cJSON *json, td_err *err);
void td_split_close(td_split *split);
// Words are bytes in the alphabet of text/tokenizer/bytelevel.h.
bool td_split_is_byte_level(const td_split *split);

td_split_scratch *td_split_scratch_new(void);
void td_split_scratch_free(td_split_scratch *scratch);

typedef td_status (*td_split_word)(void *owner, const char *word, size_t len, td_err *err);

// A text to split, and the callback that receives its words.
typedef struct {
  const char *text; // valid UTF-8
  size_t len;
  bool at_start; // the text is at the start of the input
  td_split_word word;
  void *owner;
  td_regex_scratch *regex;
} td_split_text;

td_status td_split_run(const td_split *split, td_split_scratch *scratch, const td_split_text *text,
                       td_err *err);
