// src/front/routes.h - every endpoint of the server. From this list come the HTTP server's routes
// (and so 404, 405 and Allow), the checks before a body is received, the counters of /metrics, the
// handlers' prototypes and the table in front/README.md, which a test compares.
#pragma once

#include "http/http.h"

// What a route needs or gets.
enum {
  TD_ROUTE_OPEN = 1u << 0,   // no API key
  TD_ROUTE_WORKER = 1u << 1, // a worker that accepts requests, else 503 before the body is received
  TD_ROUTE_ALWAYS = 1u << 2, // served beyond the limit of connections
};

// Handler td_serve_<name>, method, path, needs (TD_ROUTE_), what it answers.
#define TD_ROUTES(X)                                                                               \
  X(chat, "POST", "/v1/chat/completions", TD_ROUTE_WORKER, "continue a conversation")              \
  X(completions, "POST", "/v1/completions", TD_ROUTE_WORKER, "continue a text")                    \
  X(chat_render, "POST", "/v1/chat/completions/render", 0,                                         \
    "vLLM's, for routers: the token ids of its prompt")                                            \
  X(completions_render, "POST", "/v1/completions/render", 0, "the same of a text")                 \
  X(responses, "POST", "/v1/responses", TD_ROUTE_WORKER,                                           \
    "OpenAI's Responses; the last 1,024 are kept in memory for previous_response_id")              \
  X(input_tokens, "POST", "/v1/responses/input_tokens", 0, "tokens of a response's input")         \
  X(response, "GET", "/v1/responses/*", 0, "one that is kept, or its /input_items")                \
  X(response_end, "DELETE", "/v1/responses/*", 0, "forget it")                                     \
  X(messages, "POST", "/v1/messages", TD_ROUTE_WORKER,                                             \
    "Anthropic's Messages; the key may be in x-api-key")                                           \
  X(count_tokens, "POST", "/v1/messages/count_tokens", 0, "tokens of a message's prompt")          \
  X(completion, "POST", "/completion", TD_ROUTE_WORKER, "llama-server's: continue a text")         \
  X(plain_completions, "POST", "/completions", TD_ROUTE_WORKER, "the same")                        \
  X(infill, "POST", "/infill", TD_ROUTE_WORKER, "llama-server's: fill in the middle of a text")    \
  X(props, "GET", "/props", 0, "llama-server's: what the model is and how it is run")              \
  X(slots, "GET", "/slots", 0, "llama-server's: places in a batch, and which are in use")          \
  X(ollama_chat, "POST", "/api/chat", TD_ROUTE_WORKER, "Ollama's chat")                            \
  X(ollama_generate, "POST", "/api/generate", TD_ROUTE_WORKER, "Ollama's generate")                \
  X(ollama_tags, "GET", "/api/tags", 0, "the models, for Ollama's clients")                        \
  X(ollama_show, "POST", "/api/show", 0, "one of them, for Ollama's clients")                      \
  X(ollama_ps, "GET", "/api/ps", 0, "the loaded models, for Ollama's clients")                     \
  X(ollama_version, "GET", "/api/version", 0, "the version of Ollama's API, and tandem's")         \
  X(models, "GET", "/v1/models", 0, "the model's names and context")                               \
  X(model, "GET", "/v1/models/*", 0, "one of them")                                                \
  X(tokenize, "POST", "/tokenize", 0, "text to token ids")                                         \
  X(detokenize, "POST", "/detokenize", 0, "token ids to text")                                     \
  X(apply_template, "POST", "/apply-template", 0, "the prompt that messages make")                 \
  X(tokenizer_info, "GET", "/tokenizer_info", 0, "its BOS, EOS and sizes")                         \
  X(openapi, "GET", "/openapi.json", 0, "this list as an OpenAPI document")                        \
  X(version, "GET", "/version", 0, "the server's version")                                         \
  X(loads, "GET", "/v1/loads", 0, "SGLang's, for routers: requests and KV tokens")                 \
  X(plain_loads, "GET", "/loads", 0, "the same")                                                   \
  X(get_load, "GET", "/get_load", 0, "the same in short")                                          \
  X(model_info, "GET", "/model_info", 0, "SGLang's: the model's name and kind")                    \
  X(get_model_info, "GET", "/get_model_info", 0, "the same")                                       \
  X(server_info, "GET", "/server_info", 0, "SGLang's: the model, its context and limits")          \
  X(get_server_info, "GET", "/get_server_info", 0, "the same")                                     \
  X(health, "GET", "/health", TD_ROUTE_OPEN | TD_ROUTE_ALWAYS, "whether requests are served")      \
  X(metrics, "GET", "/metrics", TD_ROUTE_ALWAYS, "counters in Prometheus' format")                 \
  X(page, "GET", "/", TD_ROUTE_OPEN, "a chat page")                                                \
  X(status, "GET", "/status", TD_ROUTE_OPEN, "a page about the server's health and speed")         \
  X(page_file, "GET", "/page/*", TD_ROUTE_OPEN, "its scripts and styles")

#define TD_NO_EMBEDDINGS                                                                           \
  "this server makes no embeddings, since its models are made for generating text; use a server "  \
  "with an embedding model"
#define TD_NO_RERANK                                                                               \
  "this server does not rank documents, since its models are made for generating text"
#define TD_NO_MODEL_FILES                                                                          \
  "models are not managed through this API: use `tandem pull` on the server's machine, and start " \
  "it with --model or --models"

// Endpoints of the spoken APIs that are answered with 400, which no client tries again: method,
// path, why.
#define TD_NOT_OFFERED(X)                                                                          \
  X("POST", "/api/embed", TD_NO_EMBEDDINGS)                                                        \
  X("POST", "/api/embeddings", TD_NO_EMBEDDINGS)                                                   \
  X("POST", "/v1/embeddings", TD_NO_EMBEDDINGS)                                                    \
  X("POST", "/embedding", TD_NO_EMBEDDINGS)                                                        \
  X("POST", "/embeddings", TD_NO_EMBEDDINGS)                                                       \
  X("POST", "/rerank", TD_NO_RERANK)                                                               \
  X("POST", "/reranking", TD_NO_RERANK)                                                            \
  X("POST", "/v1/rerank", TD_NO_RERANK)                                                            \
  X("POST", "/api/pull", TD_NO_MODEL_FILES)                                                        \
  X("POST", "/api/push", TD_NO_MODEL_FILES)                                                        \
  X("POST", "/api/create", TD_NO_MODEL_FILES)                                                      \
  X("POST", "/api/copy", TD_NO_MODEL_FILES)                                                        \
  X("DELETE", "/api/delete", TD_NO_MODEL_FILES)                                                    \
  X("HEAD", "/api/blobs/*", TD_NO_MODEL_FILES)                                                     \
  X("POST", "/api/blobs/*", TD_NO_MODEL_FILES)

typedef enum {
#define X(name, method, path, needs, what) TD_ROUTE_ID_##name,
  TD_ROUTES(X)
#undef X
      TD_N_ROUTES
} td_route_id;

// ctx is the td_serve.
#define X(name, method, path, needs, what) void td_serve_##name(void *ctx, td_http_exchange *x);
TD_ROUTES(X)
#undef X
void td_serve_not_offered(void *ctx, td_http_exchange *x);
