// src/api/output_form.c - the families, and which one a chat template is of.
#include "api/output_form.h"

const td_output_form td_output_forms[TD_OUTPUT_FORMS] = {
    [TD_OUTPUT_HARMONY] = {.name = "harmony",
                           .think_begin = "<|channel|>analysis",
                           .think_end = "<|end|>",
                           .final_begin = "<|channel|>final",
                           .mentioned = "<|channel|>",
                           .keeps_specials = true},
    [TD_OUTPUT_MISTRAL] = {.name = "mistral",
                           .think_begin = "[THINK]",
                           .think_end = "[/THINK]",
                           .mentioned = "[THINK]",
                           .keeps_specials = true},
    [TD_OUTPUT_GEMMA] = {.name = "gemma",
                         .think_begin = "<|channel>thought\n",
                         .think_end = "<channel|>",
                         .mentioned = "<channel|>",
                         .ends_prompts = true,
                         .keeps_specials = true},
    [TD_OUTPUT_MINIMAX_M3] = {.name = "minimax-m3",
                              .think_begin = "<mm:think>",
                              .think_end = "</mm:think>",
                              .mentioned = "</mm:think",
                              .ends_prompts = true},
    [TD_OUTPUT_HY3] = {.name = "hy3",
                       .think_begin = "<think:opensource>",
                       .think_end = "</think:opensource>",
                       .mentioned = "</think:opensource",
                       .ends_prompts = true},
    [TD_OUTPUT_THINK] = {.name = "think",
                         .think_begin = "<think>",
                         .think_end = "</think>",
                         .mentioned = "</think",
                         .ends_prompts = true},
};

const td_output_form *td_output_form_of(const td_chat *chat) {
  for (unsigned i = 0; i < TD_OUTPUT_FORMS; i++)
    if (td_chat_template_mentions(chat, td_output_forms[i].mentioned)) return &td_output_forms[i];
  return NULL;
}
