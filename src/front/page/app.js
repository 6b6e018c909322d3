// The chat page: which chats there are, which one is shown, and the answers on their way. An answer
// belongs to the chat it was asked in, whichever is shown meanwhile.

import { fetchHealth, fetchModels, streamChat } from "./api.js";
import { element } from "./markdown.js";
import { asJson, asMarkdown, DEFAULTS, download, Store } from "./store.js";
import { copyText, viewOf } from "./view.js";

const $ = (id) => document.getElementById(id);
const NEW_TITLE = "New chat";
const SAVE_MS = 2000, POLL_MS = 1500, IDLE_POLL_MS = 20000;

const store = new Store((text) => {
  $("storage").textContent = text;
  $("storage").hidden = !text;
}, takeChange);
const views = new WeakMap(); // by message
const runs = new Map(); // by chat id: the answer being generated
const composers = new Map(); // by chat id: {draft, reason}

let chats = [], current = null, models = [];
let settings = store.loadSettings(), key = store.loadKey();

// ---- chats -------------------------------------------------------------------------------------

function newChat() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: NEW_TITLE,
           created: Date.now(), updated: Date.now(), messages: [] };
}

const isStored = (chat) => chats.includes(chat);

function touch(chat) {
  chat.updated = Date.now();
  chats = [chat, ...chats.filter((other) => other !== chat)];
  return store.save(chat);
}

function showChats() {
  $("chats").replaceChildren(...chats.map((chat) => {
    const button = element("button", runs.has(chat.id) ? "busy" : "", chat.title);
    button.type = "button";
    if (chat === current) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => select(chat));
    return element("li", "", button);
  }));
}

function select(chat) {
  if (current) composerOf(current).draft = $("input").value;
  current = chat;
  try {
    sessionStorage.setItem("tandem.chat", chat.id);
  } catch {
    // a reload shows a new chat then
  }
  openSidebar(false);
  show();
  $("scroller").scrollTop = $("scroller").scrollHeight;
  $("input").focus();
}

async function remove(chat) {
  runs.get(chat.id)?.controller.abort();
  chats = chats.filter((other) => other !== chat);
  composers.delete(chat.id);
  if (current === chat) select(chats[0] ?? newChat());
  showChats();
  await store.remove(chat.id);
}

// Another tab changed a chat. One that is answered here stays: what is stored next is its answer.
function takeChange(id, changed) {
  const own = chats.find((chat) => chat.id === id);
  if (runs.has(id)) return;
  if (!changed) chats = chats.filter((chat) => chat.id !== id);
  else if (own) Object.assign(own, changed);
  else chats.push(changed);
  chats.sort((a, b) => b.updated - a.updated);
  if (current?.id !== id) return showChats();
  composerOf(current).draft = $("input").value;
  show();
}

// ---- showing -----------------------------------------------------------------------------------

function composerOf(chat) {
  if (!composers.has(chat.id)) composers.set(chat.id, { draft: "", reason: "" });
  return composers.get(chat.id);
}

function viewFor(message) {
  if (!views.has(message)) views.set(message, viewOf(message, { edit, retry }));
  return views.get(message);
}

// All of the current chat.
function show() {
  const run = runs.get(current.id), { draft, reason } = composerOf(current);
  document.title = current.title === NEW_TITLE ? "tandem" : `${current.title} · tandem`;
  $("title").textContent = current.title;
  $("empty").hidden = current.messages.length > 0;
  for (const id of ["rename", "export-markdown", "export-json", "delete"])
    $(id).disabled = !isStored(current);
  showMessages(run);
  if ($("input").value !== draft) $("input").value = draft; // the cursor stays where it can
  resizeInput();
  showReason(reason);
  showState();
  showChats();
}

// Nodes that are there already stay untouched, and with them the focus and what is being edited.
function showMessages(run) {
  const nodes = current.messages.map((message) => {
    const view = viewFor(message);
    view.update(run?.message === message ? run : undefined);
    return view.node;
  });
  const shown = $("messages").children;
  let same = 0;
  while (same < nodes.length && shown[same] === nodes[same]) same++;
  while (shown.length > same) shown[same].remove();
  $("messages").append(...nodes.slice(same));
}

function showReason(text) {
  $("reason").textContent = text;
  $("reason").hidden = !text;
}

// The button and the context in use.
function showState() {
  $("send").textContent = runs.has(current.id) ? "Stop" : "Send";
  const used = current.messages.findLast((message) => message.stats)?.stats.context;
  const most = chosenModel()?.max_model_len;
  $("context").hidden = !used || !most;
  if (!used || !most) return;
  $("context-meter").value = used / most;
  $("context-text").textContent = `${used.toLocaleString("en")} / ${most.toLocaleString("en")}`;
}

function resizeInput() {
  const { style } = $("input");
  style.height = "auto";
  style.height = `${$("input").scrollHeight + 2}px`;
}

const isAtEnd = () => {
  const { scrollHeight, scrollTop, clientHeight } = $("scroller");
  return scrollHeight - scrollTop - clientHeight < 120;
};

function announce(text) {
  $("announcer").textContent = text;
}

// ---- answers -----------------------------------------------------------------------------------

function toSend(chat) {
  const messages = chat.messages.slice(0, -1).map(({ role, content, reasoning }) => ({
    role, content, ...(reasoning && { reasoning_content: reasoning }),
  }));
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  return messages;
}

// Redraws at most once a frame, and only what is shown. A hidden page has no frames.
function redrawSoon(chat, run) {
  if (run.isDue || current !== chat) return;
  run.isDue = true;
  requestAnimationFrame(() => {
    run.isDue = false;
    if (current !== chat) return;
    const follows = isAtEnd();
    viewFor(run.message).update(runs.get(chat.id) === run ? run : undefined);
    showState();
    if (follows) $("scroller").scrollTop = $("scroller").scrollHeight;
  });
}

function take(run, { content, reasoning, usage, timings, finish }) {
  const { message } = run, now = performance.now();
  if (content || reasoning) run.first ||= now;
  if (content && message.reasoning && !message.content)
    message.thoughtSeconds = (now - run.first) / 1000;
  message.reasoning += reasoning ?? "";
  message.content += content ?? "";
  if (finish) message.finish = finish;
  run.rate = timings?.predicted_per_second || run.rate; // the server's own comes at the end
  if (!usage || !run.first) return;
  const seconds = (now - run.first) / 1000;
  message.stats = {
    tokens: usage.completion_tokens,
    context: usage.prompt_tokens + usage.completion_tokens,
    first: (run.first - run.begin) / 1000,
    rate: run.rate || (seconds > 0.2 && (usage.completion_tokens - 1) / seconds) || 0,
  };
}

async function stream(chat, run) {
  let saved = performance.now();
  const { controller: { signal }, message } = run;
  const request = { model: chosenModel()?.id ?? "", messages: toSend(chat), settings, key, signal };
  for await (const chunk of streamChat(request)) {
    take(run, chunk);
    redrawSoon(chat, run);
    if (performance.now() - saved > SAVE_MS && isStored(chat)) {
      saved = performance.now();
      store.save(chat);
    }
  }
  if (current === chat) announce(`Answer: ${message.content}`);
}

// The chat as it was, its text in the box again, and why.
function giveBack(chat, before, text, error) {
  const composer = composerOf(chat);
  if (current === chat) composer.draft = $("input").value;
  chat.messages = before;
  composer.draft = [text, composer.draft].filter(Boolean).join("\n\n");
  composer.reason = error.name === "AbortError" ? "" : `Not sent: ${error.message}`;
  if (error.status === 401) openSettings("set-key");
}

// Generates an answer to the chat's last message. Where none begins, the chat returns to the
// messages `before`, and text to the box.
async function answer(chat, before, text) {
  const message = { role: "assistant", content: "", reasoning: "", interrupted: true };
  const run = { controller: new AbortController(), message, begin: performance.now(), first: 0 };
  runs.set(chat.id, run);
  chat.messages.push(message);
  composerOf(chat).reason = "";
  touch(chat);
  show();
  $("scroller").scrollTop = $("scroller").scrollHeight;
  announce("Generating");
  const clock = setInterval(() => redrawSoon(chat, run), 1000); // while nothing comes
  try {
    await stream(chat, run);
  } catch (error) {
    if (!message.content && !message.reasoning) giveBack(chat, before, text, error);
    else if (error.name === "AbortError") message.stopped = true;
    else message.error = error.message;
  }
  clearInterval(clock);
  delete message.interrupted;
  runs.delete(chat.id);
  if (isStored(chat)) await touch(chat);
  if (current === chat) finishShowing(chat, message);
  else showChats();
}

function finishShowing(chat, message) {
  const isBack = chat.messages.at(-1) !== message, follows = isAtEnd();
  if (!isBack) composerOf(chat).draft = $("input").value;
  show();
  if (follows) $("scroller").scrollTop = $("scroller").scrollHeight;
  if (isBack) $("input").focus();
}

function titleOf(text) {
  const line = text.split("\n").find((part) => part.trim()) ?? text;
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

function ask(chat, text, kept) {
  const before = chat.messages;
  if (runs.has(chat.id)) return;
  if (chat.title === NEW_TITLE) chat.title = titleOf(text);
  chat.messages = [...kept, { role: "user", content: text }];
  answer(chat, before, text);
}

const until = (chat, message) => chat.messages.slice(0, chat.messages.indexOf(message));

function edit(message, text) {
  ask(current, text, until(current, message));
}

function retry(message) {
  if (runs.has(current.id)) return;
  const before = current.messages;
  current.messages = until(current, message);
  answer(current, before, "");
}

function send() {
  const text = $("input").value.trim();
  if (!text || runs.has(current.id)) return;
  composerOf(current).draft = "";
  ask(current, text, current.messages);
}

// ---- the server --------------------------------------------------------------------------------

const chosenModel = () => models.find(({ id }) => id === settings.model) ?? models[0];

async function connect() {
  try {
    models = await fetchModels(key);
    const model = chosenModel();
    $("model").textContent = model ? model.id : "no model";
    if (current) showState();
  } catch (error) {
    $("model").textContent = error.status === 401 ? "An API key is needed: see Settings." : "";
    if (error.status === 401 && !$("settings").open) openSettings("set-key");
  }
}

const STATES = {
  ok: "",
  loading: "The model is loading…",
  unreachable: "The server does not answer. Trying again…",
  stuck: "The model has stopped making progress and will be restarted.",
  failed: "The model could not be loaded: see the server's log.",
};

async function watch() {
  const { status, models: states } = await fetchHealth();
  const own = states?.find(({ id }) => id === chosenModel()?.id)?.status ?? status;
  const text = STATES[status === "unreachable" ? status : own] ?? `The model is ${own}: a message wakes it.`;
  if ($("server").textContent !== text) $("server").textContent = text;
  $("server").hidden = !text;
  if (!models.length && status !== "unreachable") await connect();
  setTimeout(watch, text || !models.length ? POLL_MS : IDLE_POLL_MS);
}

// ---- dialogs -----------------------------------------------------------------------------------

function openSettings(focus = "set-system") {
  const form = $("settings").querySelector("form");
  $("model-field").hidden = models.length < 2;
  $("set-model").replaceChildren(...models.map(({ id }) => element("option", "", id)));
  for (const name of Object.keys(DEFAULTS)) form.elements[name].value = settings[name];
  form.elements.model.value = chosenModel()?.id ?? "";
  form.elements.key.value = key;
  $("settings").returnValue = "";
  $("settings").showModal();
  $(focus).focus();
}

function takeSettings() {
  if ($("settings").returnValue !== "save") return;
  const { elements } = $("settings").querySelector("form");
  settings = Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, elements[name].value.trim()]));
  key = elements.key.value.trim();
  store.saveSettings(settings);
  store.saveKey(key);
  connect();
}

// Asks for a text, or with value null whether to go on. Resolves to the text, true, or null.
function askDialog(title, label, value) {
  const dialog = $("ask"), input = $("ask-input");
  $("ask-title").textContent = title;
  $("ask-ok").textContent = label;
  input.hidden = value === null;
  input.value = value ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  (value === null ? $("ask-ok") : input).focus();
  return new Promise((resolve) => dialog.addEventListener("close", () =>
    resolve(dialog.returnValue !== "ok" ? null : value === null ? true : input.value.trim()), { once: true }));
}

async function rename() {
  const chat = current, title = await askDialog("Rename the chat", "Rename", chat.title);
  if (!title) return;
  chat.title = title;
  store.save(chat);
  composerOf(chat).draft = $("input").value;
  show();
}

async function confirmRemove() {
  const chat = current;
  if (await askDialog(`Delete “${chat.title}”?`, "Delete", null)) remove(chat);
}

function fileName(chat, end) {
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50);
  return `${name || "chat"}.${end}`;
}

function openSidebar(isOpen) {
  document.body.classList.toggle("side-open", isOpen);
  $("menu").setAttribute("aria-expanded", String(isOpen));
  $("shade").hidden = !isOpen;
  if (isOpen) $("new-chat").focus();
}

function closeSidebar() {
  openSidebar(false);
  $("menu").focus();
}

// ---- events ------------------------------------------------------------------------------------

function listen(id, type, action) {
  $(id).addEventListener(type, action);
}

listen("composer", "submit", (event) => {
  event.preventDefault();
  const run = runs.get(current.id);
  if (run) run.controller.abort();
  else send();
});
listen("input", "input", resizeInput);
listen("input", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
listen("new-chat", "click", () => select(newChat()));
listen("menu", "click", () => openSidebar(!document.body.classList.contains("side-open")));
listen("shade", "click", closeSidebar);
listen("open-settings", "click", () => openSettings());
listen("settings", "close", takeSettings);
listen("rename", "click", rename);
listen("delete", "click", confirmRemove);
listen("export-markdown", "click", () =>
  download(fileName(current, "md"), "text/markdown", asMarkdown(current)));
listen("export-json", "click", () =>
  download(fileName(current, "json"), "application/json", asJson([current])));
listen("export-all", "click", () => download("chats.json", "application/json", asJson(chats)));
listen("messages", "click", ({ target }) => {
  if (target.dataset.copies === "code")
    copyText(target, target.closest(".code").querySelector("code").textContent);
});
document.addEventListener("click", ({ target }) => {
  if (target.dataset.closes) target.closest("dialog").close();
  if (!$("more").contains(target) || target.closest(".menu")) $("more").open = false;
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if ($("more").open) $("more").open = false;
  else if (document.body.classList.contains("side-open")) closeSidebar();
  else runs.get(current.id)?.controller.abort();
});
window.addEventListener("pagehide", () => {
  for (const chat of chats) if (runs.has(chat.id)) store.save(chat);
});

chats = await store.open();
const last = (() => {
  try {
    return sessionStorage.getItem("tandem.chat");
  } catch {
    return null;
  }
})();
select(chats.find(({ id }) => id === last) ?? newChat());
await connect();
watch();
