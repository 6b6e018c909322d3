// The server's API, as far as the page needs it.

// A response other than a success; code is the protocol's, e.g. context_length_exceeded.
export class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
    this.retryAfter = Number(retryAfter) || 0; // seconds
  }

  // Whether the same request may succeed later.
  get mayPass() {
    return this.status === 0 || this.status >= 500 || this.status === 429;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new ApiError(response.status, body?.error, response.headers.get("Retry-After"));
}

// Of what changes from time to time. Past the browser's cache, in which a request waits for up to 20 s
// for an earlier one of the same address.
function fetchNow(address, options) {
  return fetch(address, { ...options, cache: "no-store" });
}

export async function fetchModels(key) {
  const response = await fetchNow("v1/models", { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data;
}

// {status, models}; status "unreachable" if nothing answers.
export async function fetchHealth() {
  try {
    return await (await fetchNow("health")).json();
  } catch {
    return { status: "unreachable" };
  }
}

export async function fetchMetrics(key) {
  const response = await fetchNow("metrics", { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return response.text();
}

// The data of each server-sent event.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks)
      if (block.startsWith("data: ")) yield block.slice(6);
  }
}

function body(model, messages, settings, continues) {
  const number = (text) => (text === "" ? undefined : Number(text));
  const stop = settings.stop.split("\n").filter(Boolean);
  return {
    model, messages, stream: true,
    return_progress: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: number(settings.temperature),
    top_p: number(settings.top_p),
    max_tokens: number(settings.max_tokens),
    top_k: number(settings.top_k),
    min_p: number(settings.min_p),
    repetition_penalty: number(settings.repetition_penalty),
    seed: number(settings.seed),
    stop: stop.length ? stop : undefined,
    response_format: settings.schema ? { type: "json_schema",
      json_schema: { name: "answer", schema: JSON.parse(settings.schema) } } : undefined,
    ...(continues && { continue_final_message: true, add_generation_prompt: false }),
    reasoning_effort: settings.effort || undefined,
    chat_template_kwargs: settings.thinking && { enable_thinking: settings.thinking === "on" } || undefined,
  };
}

// Yields {content, reasoning, usage, timings, progress, finish} of each chunk, members absent if there is
// nothing. Throws an ApiError, also for an error amid the stream.
// continues: the last message, the assistant's, goes on.
export async function* streamChat({ model, messages, settings, key, signal, continues }) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(key), signal,
    body: JSON.stringify(body(model, messages, settings, continues)),
  });
  if (!response.ok) throw await failure(response);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error);
    const choice = chunk.choices?.[0];
    yield {
      content: choice?.delta?.content, reasoning: choice?.delta?.reasoning_content,
      finish: choice?.finish_reason, usage: chunk.usage, timings: chunk.timings, progress: chunk.prompt_progress,
    };
  }
  throw new ApiError(0, { message: "the connection ended before the answer did" });
}
