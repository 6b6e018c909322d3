// The chat page: which chats there are, which one is shown, and the answers on their way. An answer
// belongs to the chat it was asked in, whichever is shown meanwhile.

import { ApiError, fetchHealth, fetchModels, streamChat } from "./api.js";
import {
  addVersion, dayOf, firstSent, mentions, newChat, NEW_TITLE, placeOf, readAttached, readChat, readChats, readStored,
  removeVersion, showVersion, slide, titleOf, toSend, withFiles,
} from "./conversation.js";
import { element } from "./markdown.js";
import { asJson, asMarkdown, DEFAULTS, download, Store } from "./store.js";
import { copyText, picture, tool, viewOf } from "./view.js";

const $ = (id) => document.getElementById(id);
const SAVE_MS = 2000, POLL_MS = 1500, IDLE_POLL_MS = 20000;
const LONG_PASTE = 4000; // characters; more become an attachment
const GIB = 2 ** 30;
const MOST_TRIES = 5, LONGEST_WAIT = 60; // of a busy server; seconds

const store = new Store((text) => {
  $("storage").textContent = text;
  $("storage").hidden = !text;
}, takeChange);
const views = new WeakMap(); // by message
const runs = new Map(); // by chat id: the answer being generated
const composers = new Map(); // by chat id: {draft, files, reason, mends}; mends: reason may pass by itself
const fallen = element("p", "fallen", element("span", "",
  "The messages above no longer fit into the context: the model does not see them."),
  tool("Continue in a new chat with a summary", summarize));
const SUMMARIZE = "Summarize our conversation so far for someone who is to continue it: what was asked, what was " +
  "found and decided, and what is open. Keep names, figures and code that are needed. Write only the summary.";
// Enter is a line break where there is no keyboard, and the button sends.
const isTouch = matchMedia("(pointer: coarse)").matches;

let chats = [], current = null, models = [];
let settings = store.loadSettings(), folded = store.loadFolded(), { key, isKept } = store.loadKey();

// ---- chats -------------------------------------------------------------------------------------

const isStored = (chat) => chats.includes(chat);

function touch(chat) {
  chat.updated = Date.now();
  chats = [chat, ...chats.filter((other) => other !== chat)];
  return store.save(chat);
}

function chatItem(chat, words) {
  const place = words && placeOf(chat, words);
  const button = element("button", runs.has(chat.id) ? "busy" : "", element("span", "", chat.title));
  button.type = "button";
  if (chat === current) button.setAttribute("aria-current", "true");
  if (place) button.append(element("small", "", place.before, element("mark", "", place.words), place.after));
  button.addEventListener("click", () => {
    select(chat);
    if (place) showPlace(chat, place);
  });
  return element("li", "", button);
}

// What a search finds is shown, folded or not.
function folderItem(name, inside, words) {
  const summary = element("summary", "", `${name} (${inside.length})`);
  const folder = element("details", "", summary, element("ul", "", inside.map((chat) => chatItem(chat, words))));
  folder.open = Boolean(words) || !folded.includes(name);
  summary.addEventListener("click", () => { // before it opens or closes
    if (!words) fold(name, folder.open);
  });
  return element("li", "", folder);
}

function fold(name, isFolded) {
  folded = [...folded.filter((other) => other !== name), ...(isFolded ? [name] : [])];
  store.saveFolded(folded);
}

const folderNames = () =>
  [...new Set(chats.map(({ folder }) => folder))].filter(Boolean).sort((a, b) => a.localeCompare(b));

// Folders, and under them by day the chats that are in none.
function showChats() {
  const words = $("search").value.trim().toLowerCase();
  $("search").hidden = chats.length < 2;
  const shown = words ? chats.filter((chat) => mentions(chat, words)) : chats;
  const folders = folderNames().flatMap((name) => {
    const inside = shown.filter(({ folder }) => folder === name);
    return inside.length ? [folderItem(name, inside, words)] : [];
  });
  let day = "";
  const loose = shown.filter(({ folder }) => !folder).flatMap((chat) => {
    const own = dayOf(chat.updated), heading = own === day ? [] : [element("li", "day", own)];
    day = own;
    return [...heading, chatItem(chat, words)];
  });
  $("chats").replaceChildren(...folders, ...loose);
  if (words && !shown.length) $("chats").append(element("li", "note", "No chat has these words."));
}

// Scrolls to the message with what was searched for.
function showPlace(chat, { at }) {
  const { node } = viewFor(chat.messages[at]);
  node.scrollIntoView({ block: "center" });
  node.classList.add("found");
  setTimeout(() => node.classList.remove("found"), 2500);
}

function select(chat) {
  if (current) setDraft(current, $("input").value);
  current = chat;
  try {
    sessionStorage.setItem("tandem.chat", chat.id);
  } catch {
    // a reload shows a new chat then
  }
  openSidebar(false);
  show();
  if (models.length) showModels();
  $("scroller").scrollTop = $("scroller").scrollHeight;
  $("input").focus();
}

async function remove(chat) {
  runs.get(chat.id)?.controller.abort();
  chats = chats.filter((other) => other !== chat);
  composers.delete(chat.id);
  store.saveDraft(chat.id, "");
  if (current === chat) select(chats[0] ?? newChat());
  showChats();
  await store.remove(chat.id);
}

// Another tab changed a chat. One that is answered here stays: what is stored next is its answer.
function takeChange(id, stored) {
  const own = chats.find((chat) => chat.id === id), [changed] = readStored(stored ? [stored] : []);
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

const draftKey = (chat) => (isStored(chat) ? chat.id : "");

function composerOf(chat) {
  if (!composers.has(chat.id))
    composers.set(chat.id, { draft: store.loadDraft(draftKey(chat)), files: [], reason: "" });
  return composers.get(chat.id);
}

function setDraft(chat, text) {
  composerOf(chat).draft = text;
  store.saveDraft(draftKey(chat), text);
}

function viewFor(message) {
  if (!views.has(message)) views.set(message, viewOf(message, { edit, retry, goOn, rewrite, show: changeVersion }));
  return views.get(message);
}

// All of the current chat.
function show() {
  const run = runs.get(current.id), { draft, reason } = composerOf(current);
  document.title = current.title === NEW_TITLE ? "tandem" : `${current.title} · tandem`;
  $("title").textContent = current.title;
  $("empty").hidden = current.messages.length > 0;
  for (const id of ["rename", "move", "suggest-title", "export-markdown", "export-json", "delete"])
    $(id).disabled = !isStored(current);
  showMessages(run);
  if ($("input").value !== draft) $("input").value = draft; // the cursor stays where it can
  resizeInput();
  showFiles();
  showReason(reason);
  showState();
  showChats();
}

// Nodes that are there already stay untouched, and with them the focus and what is being edited.
function showMessages(run) {
  const nodes = current.messages.map((message) => {
    const view = viewFor(message);
    view.update(run?.message === message ? run : undefined, Boolean(run), message === current.messages.at(-1));
    return view.node;
  });
  const from = firstSent(current);
  if (from) nodes.splice(from, 0, fallen);
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

// What is attached to the message that is being written; a click takes it away.
function showFiles() {
  const { files } = composerOf(current);
  $("files").hidden = !files.length;
  $("files").replaceChildren(...files.map((file) => {
    const size = file.image ? "" : ` (${file.text.length.toLocaleString("en")} characters)`;
    const button = element("button", "", ...(file.image ? [picture(file, "")] : []), `${file.name}${size} ✕`);
    button.type = "button";
    button.setAttribute("aria-label", `Remove ${file.name}`);
    button.addEventListener("click", () => {
      files.splice(files.indexOf(file), 1);
      showFiles();
      $("input").focus();
    });
    return element("li", "", button);
  }));
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

// Redraws at most once a frame, and only what is shown. A hidden page has no frames.
function redrawSoon(chat, run) {
  if (run.isDue || current !== chat) return;
  run.isDue = true;
  requestAnimationFrame(() => {
    run.isDue = false;
    if (current !== chat) return;
    const follows = isAtEnd();
    const isRunning = runs.get(chat.id) === run;
    viewFor(run.message).update(isRunning ? run : undefined, isRunning, true);
    showState();
    if (follows) $("scroller").scrollTop = $("scroller").scrollHeight;
  });
}

function take(run, { content, reasoning, usage, timings, progress, finish }) {
  const { message } = run, now = performance.now();
  if (progress) run.progress = progress;
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

// Where little room would be left for an answer, the oldest messages are left out until half of
// what was sent is gone, so that not every turn has to be prefilled anew.
function chooseFirst(chat, end) {
  const { stats } = chat.messages[end - 2] ?? {}, most = chosenModel(chat)?.max_model_len;
  const next = (stats?.context ?? 0) + chat.messages[end - 1].content.length / 3; // tokens, about
  const from = firstSent(chat);
  return stats && most && next > most - Math.min(most / 4, 4096) ? slide(chat, from, end) : from;
}

async function streamFrom(chat, run, from, end) {
  const { controller: { signal }, message, continues } = run, model = chosenModel(chat)?.id ?? "";
  const settings = settingsOf(chat), messages = toSend(chat.messages.slice(0, end), from, settings.system);
  let saved = performance.now();
  message.model = model;
  if (from) message.from = from;
  if (from && current === chat) showMessages(run);
  for await (const chunk of streamChat({ model, messages, settings, key, signal, continues })) {
    take(run, chunk);
    redrawSoon(chat, run);
    if (performance.now() - saved > SAVE_MS && isStored(chat)) {
      saved = performance.now();
      store.save(chat);
    }
  }
}

// Leaves out older messages as long as the server says that they do not fit.
async function untilItFits(chat, from, end, ask) {
  for (;;) {
    try {
      return await ask(from);
    } catch (error) {
      const later = slide(chat, from, end);
      if (error.code !== "context_length_exceeded" || later === from) throw error;
      from = later;
    }
  }
}

// Waits as long as a busy server says before the request is sent again.
async function whileBusy(chat, run, ask) {
  for (let n = 1; ; n++) {
    try {
      return await ask();
    } catch (error) {
      if (!error.retryAfter || error.retryAfter > LONGEST_WAIT || n === MOST_TRIES) throw error;
      run.again = performance.now() + error.retryAfter * 1000;
      redrawSoon(chat, run);
      await pause(error.retryAfter * 1000, run.controller.signal);
      run.again = 0;
    }
  }
}

const pause = (ms, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    reject(signal.reason);
  }, { once: true });
});

async function stream(chat, run) {
  const end = chat.messages.indexOf(run.message) + (run.continues ? 1 : 0);
  await untilItFits(chat, chooseFirst(chat, end), end, (from) =>
    whileBusy(chat, run, () => streamFrom(chat, run, from, end)));
  if (current === chat) announce(`Answer: ${run.message.content}`);
}

// The chat as it was, the message's text in the box again, and why.
function giveBack(chat, undo, asked, error) {
  const composer = composerOf(chat);
  if (current === chat) composer.draft = $("input").value;
  undo();
  if (asked) {
    setDraft(chat, [asked.text ?? asked.content, composer.draft].filter(Boolean).join("\n\n"));
    composer.files = [...asked.files ?? [], ...composer.files];
  }
  composer.reason = error.name === "AbortError" ? "" : `Not sent: ${error.message}`;
  composer.mends = !(error instanceof ApiError) || error.mayPass;
  if (composer.mends) watchAfter(POLL_MS);
  if (error.status === 401) openSettings("set-key");
}

// Resolves to a function that ends this tab's claim to answer in the chat; null: another tab does. Where the
// browser has no locks (http on another machine), none does.
const claim = (chat) => navigator.locks ? new Promise((resolve) => {
  navigator.locks.request(`tandem.chat.${chat.id}`, { ifAvailable: true }, (lock) =>
    lock ? new Promise((release) => resolve(release)) : resolve(null));
}) : Promise.resolve(() => {});

// Generates an answer to the chat's last message, or continues it. Where none begins, undo() makes the chat what
// it was, and asked, a message, returns to the box.
async function answer(chat, message, undo, asked, continues = false) {
  const run = { controller: new AbortController(), message, continues, begin: performance.now(), first: 0 };
  runs.set(chat.id, run);
  composerOf(chat).reason = "";
  show();
  const release = await claim(chat);
  if (!release) {
    runs.delete(chat.id);
    giveBack(chat, undo, asked, new Error("this chat is being answered in another tab"));
    if (current === chat) show();
    return;
  }
  touch(chat);
  if (current === chat) showChats();
  $("scroller").scrollTop = $("scroller").scrollHeight;
  announce("Generating");
  const clock = setInterval(() => redrawSoon(chat, run), 1000); // while nothing comes
  try {
    await stream(chat, run);
  } catch (error) {
    if (!continues && !message.content && !message.reasoning) giveBack(chat, undo, asked, error);
    else if (error.name === "AbortError") message.stopped = true;
    else message.error = error.message;
  }
  clearInterval(clock);
  delete message.interrupted;
  runs.delete(chat.id);
  if (isStored(chat)) await touch(chat);
  release();
  if (current === chat) finishShowing(chat, message);
  else showChats();
}

function finishShowing(chat, message) {
  const isBack = chat.messages.at(-1) !== message, follows = isAtEnd();
  if (!isBack) setDraft(chat, $("input").value);
  show();
  if (follows) $("scroller").scrollTop = $("scroller").scrollHeight;
  if (isBack) $("input").focus();
}

const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", interrupted: true });

function newQuestion(text, files) {
  const content = withFiles(text, files);
  return { role: "user", content, ...(files.length && { text, files }) };
}

function edit(message, text) {
  const chat = current, at = message.fork?.at ?? 0, question = newQuestion(text, message.files ?? []);
  if (runs.has(chat.id)) return;
  addVersion(chat, message, question);
  const reply = newAnswer();
  chat.messages.push(reply);
  answer(chat, reply, () => removeVersion(chat, question, at), question);
}

function retry(message) {
  const chat = current, at = message.fork?.at ?? 0, reply = newAnswer();
  if (runs.has(chat.id)) return;
  addVersion(chat, message, reply);
  answer(chat, reply, () => removeVersion(chat, reply, at));
}

// An answer that was cut goes on where it ended.
function goOn(message) {
  const chat = current;
  if (runs.has(chat.id)) return;
  for (const name of ["finish", "stopped", "error"]) delete message[name];
  message.interrupted = true;
  answer(chat, message, () => {}, null, true);
}

// Another version of an answer, by the user.
function rewrite(message, content) {
  const chat = current;
  if (runs.has(chat.id)) return;
  addVersion(chat, message, { role: "assistant", content, reasoning: message.reasoning });
  setDraft(chat, $("input").value);
  touch(chat);
  show();
}

function changeVersion(message, at) {
  const chat = current;
  if (runs.has(chat.id)) return;
  const { top } = viewFor(message).node.getBoundingClientRect();
  const first = showVersion(chat, message, at);
  store.save(chat);
  setDraft(chat, $("input").value);
  show();
  const { node, versions } = viewFor(first); // stays where it was, with the focus on an arrow
  $("scroller").scrollTop += node.getBoundingClientRect().top - top;
  [versions.after, versions.before].find((button) => !button.disabled)?.focus({ preventScroll: true });
}

function send() {
  const chat = current, text = $("input").value.trim(), { files } = composerOf(chat);
  if (!(text || files.length) || runs.has(chat.id)) return;
  const before = chat.messages, question = newQuestion(text, files), reply = newAnswer();
  setDraft(chat, "");
  composerOf(chat).files = [];
  if (chat.title === NEW_TITLE) chat.title = titleOf(text || files[0].name);
  chat.messages = [...before, question, reply];
  answer(chat, reply, () => { chat.messages = before; }, question);
}

// A new chat to whose first message a summary of this one is attached.
async function summarize(button) {
  const chat = current, settings = settingsOf(chat), label = button.textContent;
  const all = [...chat.messages, { role: "user", content: SUMMARIZE }];
  let text = "";
  button.disabled = true;
  button.textContent = "Summarizing…";
  try {
    await untilItFits(chat, firstSent(chat), chat.messages.length, async (from) => {
      const messages = toSend(all, from, settings.system), model = chosenModel(chat)?.id ?? "";
      for await (const { content } of streamChat({ model, messages, settings, key })) text += content ?? "";
    });
    if (!text.trim()) throw new Error("the model wrote nothing");
    const next = { ...newChat(), ...(chat.settings && { settings: { ...chat.settings } }) };
    composerOf(next).files.push({ name: `Summary of “${chat.title}”`, text: text.trim() });
    select(next);
  } catch (error) {
    showReason(`No summary: ${error.message}`);
  }
  button.disabled = false;
  button.textContent = label;
}

// ---- attached files ----------------------------------------------------------------------------

async function attach(files) {
  const chat = current, composer = composerOf(chat), reasons = [];
  for (const file of files) {
    try {
      composer.files.push(await readAttached(file, [...chat.messages, composer].flatMap((one) => one.files ?? [])));
    } catch (error) {
      reasons.push(error.message);
    }
  }
  composer.reason = reasons.join("; ");
  composer.mends = false;
  if (current !== chat) return;
  showFiles();
  showReason(composer.reason);
  $("input").focus();
}

function paste(event) {
  const text = event.clipboardData.getData("text/plain"), { files } = composerOf(current);
  if (event.clipboardData.files.length) {
    event.preventDefault();
    attach(event.clipboardData.files);
  } else if (text.length > LONG_PASTE) {
    event.preventDefault();
    const n = files.filter(({ name }) => name.startsWith("Pasted text")).length;
    files.push({ name: n ? `Pasted text ${n + 1}` : "Pasted text", text });
    showFiles();
  }
}

async function importChats(files) {
  const found = [];
  try {
    for (const file of files) found.push(...readChats(await file.text()));
  } catch (error) {
    await askDialog(error.message, "OK", null);
    return;
  }
  for (const chat of found) {
    const own = chats.find(({ id }) => id === chat.id);
    const isHere = own && asJson(readChat(own).messages) === asJson(chat.messages);
    if (isHere) continue;
    if (own) chat.id = newChat().id;
    chats.push(chat);
    await store.save(chat);
  }
  chats.sort((a, b) => b.updated - a.updated);
  $("settings").close();
  if (found.length) select(chats.find(({ id }) => id === found[0].id));
}

// ---- the server --------------------------------------------------------------------------------

const settingsOf = (chat) => chat?.settings ?? settings;
const chosenModel = (chat = current) => models.find(({ id }) => id === settingsOf(chat).model) ?? models[0];

const STATUS_NAMES = { ok: "loaded", sleeping: "not loaded", failed: "cannot be loaded" };

// The models with their sizes and whether they are loaded; states: of /health, fresher.
function showModels(states = []) {
  const options = models.map(({ id, size, status }) => {
    const own = states.find((state) => state.id === id)?.status ?? status;
    return [id, [id, size && `${(size / GIB).toFixed(1)} GiB`, STATUS_NAMES[own] ?? own].filter(Boolean).join(" · ")];
  });
  const picker = $("picker"), same = options.length === picker.length &&
    options.every(([id, text], i) => picker[i].value === id && picker[i].text === text);
  if (!same) picker.replaceChildren(...options.map(([id, text]) => new Option(text, id)));
  picker.value = chosenModel()?.id ?? "";
  picker.hidden = models.length < 2;
  $("model").textContent = chosenModel()?.id ?? "no model";
}

// An answer to a key that has changed since says nothing.
async function connect() {
  const asked = key;
  try {
    const found = await fetchModels(asked);
    if (asked !== key) return;
    models = found;
    showModels();
    if (current) showState();
  } catch (error) {
    if (asked !== key) return;
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

// The server is well again: what it refused meanwhile can be sent.
function clearMended() {
  for (const composer of composers.values()) {
    if (composer.mends && composer.reason) composer.reason = "";
  }
  showReason(composerOf(current).reason);
}

async function watch() {
  const { status, models: states } = await fetchHealth();
  const own = states?.find(({ id }) => id === chosenModel()?.id)?.status ?? status;
  const text = STATES[status === "unreachable" ? status : own] ?? `The model is ${own}: a message wakes it.`;
  if ($("server").textContent !== text) $("server").textContent = text;
  $("server").hidden = !text;
  if (!models.length && status !== "unreachable") await connect();
  if (models.length && states) showModels(states);
  if (!text) clearMended();
  watchAfter(text || !models.length ? POLL_MS : IDLE_POLL_MS);
}

let watchTimer;
function watchAfter(ms) {
  clearTimeout(watchTimer);
  watchTimer = setTimeout(watch, ms);
}

// ---- dialogs -----------------------------------------------------------------------------------

const SET = Object.keys(DEFAULTS).filter((name) => name !== "model"); // that has a picker of its own
const EXTRA = ["top_k", "min_p", "repetition_penalty", "seed", "stop", "schema"]; // seldom changed
const TITLE = "Give this conversation a title of at most six words. Write only the title, without quotes.";

function setTheme(theme) {
  document.documentElement.style.colorScheme = theme || "light dark";
}

function checkSchema({ target }) {
  let isJson = true;
  try {
    if (target.value.trim()) JSON.parse(target.value);
  } catch {
    isJson = false;
  }
  target.setCustomValidity(isJson ? "" : "This is not JSON.");
}

function showPresets(chosen = "") {
  $("preset").replaceChildren(new Option("none", ""), ...Object.keys(store.loadPresets()).map((name) => new Option(name)));
  $("preset").value = chosen;
  $("drop-preset").disabled = !chosen;
}

function usePreset() {
  const values = store.loadPresets()[$("preset").value];
  if (values) fillSettings({ ...DEFAULTS, ...values });
  $("drop-preset").disabled = !values;
}

async function keepPreset() {
  const { elements } = $("settings").querySelector("form");
  const values = Object.fromEntries(SET.map((name) => [name, elements[name].value.trim()]));
  const name = await askDialog("Keep these settings as", "Keep", $("preset").value);
  if (!name) return;
  store.savePresets({ ...store.loadPresets(), [name]: values });
  showPresets(name);
}

function dropPreset() {
  const { [$("preset").value]: _, ...others } = store.loadPresets();
  store.savePresets(others);
  showPresets();
}

function fillSettings(values) {
  const { elements } = $("settings").querySelector("form");
  for (const name of SET) elements[name].value = values[name];
}

function openSettings(focus = "set-system") {
  const form = $("settings").querySelector("form");
  fillSettings(settingsOf(current));
  form.elements.only.checked = Boolean(current.settings);
  form.querySelector(".extra").open = EXTRA.some((name) => form.elements[name].value);
  form.elements.theme.value = store.loadTheme();
  showPresets();
  form.elements.key.value = key;
  form.elements.keep.checked = isKept;
  $("settings").returnValue = "";
  $("settings").showModal();
  $(focus).focus();
}

function saveSettings() {
  store.saveSettings(settings);
  if (isStored(current)) store.save(current);
}

function takeSettings() {
  if ($("settings").returnValue !== "save") return;
  const { elements } = $("settings").querySelector("form");
  if (elements.only.checked) current.settings ??= { ...settings };
  else delete current.settings;
  for (const name of SET) settingsOf(current)[name] = elements[name].value.trim();
  store.saveTheme(elements.theme.value);
  setTheme(elements.theme.value);
  key = elements.key.value.trim();
  isKept = elements.keep.checked;
  saveSettings();
  store.saveKey({ key, isKept });
  connect();
}

// Asks for a text, one of the choices or another, or with value null whether to go on. Resolves to
// the text, true, or null.
function askDialog(title, label, value, choices = []) {
  const dialog = $("ask"), input = $("ask-input");
  $("ask-title").textContent = title;
  $("ask-ok").textContent = label;
  input.hidden = value === null;
  input.value = value ?? "";
  $("ask-choices").replaceChildren(...choices.map((choice) => tool(choice || "No folder", () => {
    input.value = choice;
    dialog.close("ok");
  })));
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

async function move() {
  const chat = current, others = ["", ...folderNames()].filter((name) => name !== (chat.folder ?? ""));
  const folder = await askDialog(`Move “${chat.title}” to the folder`, "Move", chat.folder ?? "", others);
  if (folder === null) return;
  chat.folder = titleOf(folder);
  fold(chat.folder, false);
  store.save(chat);
  showChats();
}

// A title of the model's own.
async function suggestTitle() {
  const chat = current, messages = toSend([...chat.messages, { role: "user", content: TITLE }], firstSent(chat), "");
  const settings = { ...DEFAULTS, model: settingsOf(chat).model, max_tokens: "60", thinking: "off" };
  let title = "";
  try {
    for await (const { content } of streamChat({ model: chosenModel(chat)?.id ?? "", messages, settings, key }))
      title += content ?? "";
    title = titleOf(title.trim().replace(/^["'“*#\s]+|["'”*.\s]+$/g, ""));
    if (!title) throw new Error("the model wrote nothing");
    chat.title = title;
    store.save(chat);
    if (current === chat) composerOf(chat).draft = $("input").value;
    show();
  } catch (error) {
    showReason(`No title: ${error.message}`);
  }
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
listen("input", "input", () => {
  resizeInput();
  setDraft(current, $("input").value);
});
listen("input", "paste", paste);
listen("input", "keydown", (event) => {
  if (event.key === "ArrowUp" && !$("input").value && !runs.has(current.id)) {
    const last = current.messages.findLast(({ role }) => role === "user");
    if (!last) return;
    event.preventDefault();
    viewFor(last).edit();
    return;
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
  event.preventDefault();
  send();
});
listen("new-chat", "click", () => select(newChat()));
listen("new-chat-top", "click", () => select(newChat()));
listen("search", "input", showChats);
listen("attach", "click", () => $("attach-input").click());
listen("attach-input", "change", async ({ target }) => {
  await attach(target.files);
  target.value = "";
});
listen("import", "click", () => $("import-input").click());
listen("import-input", "change", async ({ target }) => {
  await importChats(target.files);
  target.value = "";
});
listen("picker", "change", ({ target }) => {
  settingsOf(current).model = target.value;
  saveSettings();
  showModels();
  showState();
});
listen("content", "dragover", (event) => event.preventDefault());
listen("content", "drop", (event) => {
  event.preventDefault();
  attach(event.dataTransfer.files);
});
listen("menu", "click", () => openSidebar(!document.body.classList.contains("side-open")));
listen("shade", "click", closeSidebar);
listen("open-settings", "click", () => openSettings());
listen("settings", "close", takeSettings);
listen("set-only", "change", ({ target }) => fillSettings(target.checked ? settingsOf(current) : settings));
listen("rename", "click", rename);
listen("move", "click", move);
listen("suggest-title", "click", suggestTitle);
listen("set-schema", "input", checkSchema);
listen("preset", "change", usePreset);
listen("keep-preset", "click", keepPreset);
listen("drop-preset", "click", dropPreset);
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
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    if (event.shiftKey) return select(newChat());
    openSidebar(true);
    if (!$("search").hidden) $("search").focus();
    return;
  }
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if ($("more").open) $("more").open = false;
  else if (document.body.classList.contains("side-open")) closeSidebar();
  else runs.get(current.id)?.controller.abort();
});
window.addEventListener("pagehide", () => {
  for (const chat of chats) if (runs.has(chat.id)) store.save(chat);
});

function lastShown() {
  try {
    return sessionStorage.getItem("tandem.chat");
  } catch {
    return null;
  }
}

// The chats come when the browser has them; until then one can write in a new one.
async function begin() {
  const last = lastShown(), first = newChat();
  select(first);
  const draft = $("input").value;
  const stored = readStored(await store.open());
  for (const chat of chats) store.save(chat); // sent meanwhile
  chats = [...chats, ...stored];
  const shown = chats.find(({ id }) => id === last);
  const isUsed = current !== first || isStored(first) || $("input").value !== draft || composerOf(first).files.length;
  if (shown && !isUsed) select(shown);
  else showChats();
}

setTheme(store.loadTheme());
await begin();
await connect();
watch();
