// The status page: what /health and /metrics say, for a person. Speeds and times are of the samples of
// the last SPAN_MS.

import { fetchHealth, fetchMetrics } from "./api.js";
import { element } from "./markdown.js";
import { Store } from "./store.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 2000, SPAN_MS = 20000, GIB = 2 ** 30;
const MOST_POINTS = 450; // of a history: 15 minutes
const samples = []; // {at, metrics}, the oldest first
const histories = new Map(); // by a figure's name: what it was, the oldest first

// The samples of Prometheus' text format: [{name, labels, value}].
function parseMetrics(text) {
  return [...text.matchAll(/^(\w+)(?:\{(.*)\})? (\S+)$/gm)].map(([, name, labels = "", value]) => ({
    name, value: Number(value),
    labels: Object.fromEntries([...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, text]) =>
      [key, text.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c))])),
  }));
}

// The sum over all samples of the name with these labels.
function sum(metrics, name, labels = {}) {
  const isMeant = (sample) => sample.name === `tandem_${name}` &&
    Object.entries(labels).every(([key, value]) => sample.labels[key] === value);
  return metrics.filter(isMeant).reduce((total, { value }) => total + value, 0);
}

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const gib = (bytes) => `${number(bytes / GIB, 1)} GiB`;
const share = (part, whole) => (whole ? `${number(100 * part / whole)} %` : "–");

// How much a counter grew within the span, less than nothing after a restart.
function growth(name) {
  return sum(samples.at(-1).metrics, name) - sum(samples[0].metrics, name);
}

const rate = (name) => growth(name) / ((samples.at(-1).at - samples[0].at) / 1000 || Infinity);

const speed = (name) => samples.length > 1 ? `${number(rate(name), 1)} tokens/s` : "–";

// ---- histories ---------------------------------------------------------------------------------

const HISTORIES = {
  Running: (health) => health.running,
  Waiting: (health) => health.waiting,
  Generating: () => rate("generation_tokens_total"),
  Prefilling: () => rate("prompt_tokens_total"),
  "Memory in use": () => sum(samples.at(-1).metrics, "memory_bytes") - sum(samples.at(-1).metrics, "memory_available_bytes"),
};

function keepHistories(health) {
  for (const [name, value] of Object.entries(HISTORIES)) {
    const points = histories.get(name) ?? [];
    points.push(value(health) || 0);
    if (points.length > MOST_POINTS) points.shift();
    histories.set(name, points);
  }
}

// A line of a figure's history; the figure itself stands above it.
function sparkline(name) {
  const points = histories.get(name) ?? [], most = Math.max(...points);
  if (points.length < 2) return [];
  const make = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const svg = make("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", class: "history", "aria-hidden": "true" });
  svg.append(make("polyline", { points: points.map((value, i) =>
    `${(100 * i / (points.length - 1)).toFixed(1)},${(23 - (most ? 22 * value / most : 0)).toFixed(1)}`).join(" ") }));
  return [svg];
}

function uptime(metrics) {
  const started = sum(metrics, "start_time_seconds"), minutes = Math.floor((Date.now() / 1000 - started) / 60);
  const parts = [[Math.floor(minutes / 1440), "d"], [Math.floor(minutes / 60) % 24, "h"], [minutes % 60, "min"]];
  return started ? parts.filter(([n], i) => n || i === 2).map(([n, unit]) => `${n} ${unit}`).join(" ") : "–";
}

// The mean of a histogram's values within the span.
function mean(name) {
  const n = growth(`${name}_seconds_count`), ms = 1000 * growth(`${name}_seconds_sum`) / n;
  return n > 0 ? ms < 1000 ? `${number(ms, ms < 10 ? 1 : 0)} ms` : `${number(ms / 1000, 1)} s` : "–";
}

function figures(health) {
  const { metrics } = samples.at(-1), of = (name) => sum(metrics, name);
  const inUse = (total, left) => `${gib(total - left)} of ${gib(total)}`;
  const gpus = metrics.filter(({ name, value }) => name === "tandem_gpu_memory_bytes" && value > 0);
  return [
    ["Running", number(health.running)], ["Waiting", number(health.waiting)],
    ["Generating", speed("generation_tokens_total")], ["Prefilling", speed("prompt_tokens_total")],
    ["Time to first token", mean("time_to_first_token")], ["Time per token", mean("inter_token_latency")],
    ["Prompt tokens from the cache", share(of("prefix_cache_hits_total"), of("prefix_cache_queries_total"))],
    ["Memory in use", inUse(of("memory_bytes"), of("memory_available_bytes"))],
    ...gpus.map(({ labels, value }) =>
      [`GPU memory, ${labels.worker}`, inUse(value, sum(metrics, "gpu_memory_free_bytes", labels))]),
    ...of("expert_cache_slots") ? [["Experts from the GPU's cache", share(of("expert_cache_hits_total"),
      of("expert_cache_hits_total") + of("expert_cache_misses_total"))]] : [],
    ...of("streamed_expert_slots") ? [["Experts found in memory", share(of("streamed_expert_hits_total"),
      of("streamed_expert_hits_total") + of("streamed_expert_misses_total"))],
      ["Drive", `${number(of("streamed_expert_read_bytes_total") / 1e9 /
        of("streamed_expert_read_seconds_total"), 2)} GB/s`]] : [],
    ...of("kv_disk_bytes") ? [["Cache on disk", gib(of("kv_disk_bytes"))]] : [],
    ...of("spec_decode_num_draft_tokens_total") ? [["Drafted tokens that were right",
      share(of("spec_decode_num_accepted_tokens_total"), of("spec_decode_num_draft_tokens_total"))]] : [],
    ["Up for", uptime(metrics)],
    ["Version", metrics.find(({ name }) => name === "tandem_build_info")?.labels.version ?? "–"],
    ["Requests that failed", number(sum(metrics, "requests_total", { finished_reason: "error" }))],
  ];
}

function showTable(id, heads, rows) {
  const row = (cells, name) => element("tr", "", ...cells.map((cell) =>
    element(name, /^[\d,]+( %)?$/.test(cell) ? "to-right" : "", cell)));
  $(id).replaceChildren(element("thead", "", row(heads, "th")),
    element("tbody", "", ...rows.map((cells) => row(cells, "td"))));
}

function show(health) {
  const { metrics } = samples.at(-1) ?? { metrics: [] };
  const of = (name, id) => sum(metrics, name, { model_name: id });
  $("state").textContent = health.status;
  document.title = `${health.status} · tandem`;
  $("figures").replaceChildren(...samples.length ? figures(health).map(([name, value]) =>
    element("div", "", element("dt", "", name), element("dd", "", value, ...sparkline(name)))) : []);
  showTable("models", ["Model", "State", "Running", "Waiting", "KV cache in use", "Prompt tokens", "Generated"],
    (health.models ?? []).map(({ id, status, running, waiting }) => [id, status, number(running), number(waiting),
      share(of("kv_cache_usage_perc", id), 1), number(of("prompt_tokens_total", id)),
      number(of("generation_tokens_total", id))]));
  showTable("workers", ["Worker", "Model", "State", "Computes on", "Running", "Threads", "Restarts"],
    (health.workers ?? []).map(({ role, model, status, reason, running, threads, restarts }) => {
      const own = health.models.find(({ id }) => id === model) ?? health.models[0];
      return [role, own.id, reason ? `${status}: ${reason}` : status,
        own.choices?.gpu ?? own.choices?.kernels ?? "", ...[running, threads, restarts].map((n) => number(n))];
    }));
}

const { key } = new Store(() => {}, () => {}).loadKey();

async function poll() {
  const health = await fetchHealth();
  let problem = health.status === "unreachable" ? "The server does not answer. Trying again…" : "";
  try {
    samples.push({ at: performance.now(), metrics: parseMetrics(await fetchMetrics(key)) });
    while (samples.at(-1).at - samples[0].at > SPAN_MS) samples.shift();
    if (growth("http_requests_total") < 0) samples.splice(0, samples.length - 1); // another server
    keepHistories(health);
  } catch (error) {
    if (error.status === 401) problem = "The figures need an API key: enter it in the chat page's settings.";
  }
  $("problem").hidden = !problem;
  if ($("problem").textContent !== problem) $("problem").textContent = problem;
  show(health);
  setTimeout(poll, POLL_MS);
}

poll();
