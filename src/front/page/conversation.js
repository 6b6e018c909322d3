// Chats as data: versions of messages, what of a chat is sent, and chats from elsewhere.
//
// chat.messages is the conversation that is shown. Where a message was edited or an answer retried,
// the first message that differs has fork: {at, tails}; tails[i] is version i with everything that
// follows it, tails[at] is null: that one is in chat.messages.

import { DEFAULTS } from "./store.js";

export const NEW_TITLE = "New chat";

export function newChat() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: NEW_TITLE,
           created: Date.now(), updated: Date.now(), messages: [] };
}

// ---- versions ----------------------------------------------------------------------------------

// Ends the conversation before the message; what was there becomes another version of what follows.
// Returns the fork for the next message.
function cutAt(chat, message) {
  const at = chat.messages.indexOf(message), tail = chat.messages.slice(at);
  const fork = message.fork ?? { at: 0, tails: [null] };
  delete message.fork;
  fork.tails[fork.at] = tail;
  chat.messages = chat.messages.slice(0, at);
  return fork;
}

// Puts next, a message, in the place of message and all that follows.
export function addVersion(chat, message, next) {
  const fork = cutAt(chat, message);
  next.fork = { at: fork.tails.push(null) - 1, tails: fork.tails };
  chat.messages.push(next);
}

// Shows version number `at` of the message; returns its first message.
export function showVersion(chat, message, at) {
  if (!message.fork?.tails[at]) return message;
  const { tails } = cutAt(chat, message), [first] = tails[at];
  first.fork = { at, tails };
  chat.messages.push(...tails[at]);
  tails[at] = null;
  return first;
}

// Undoes the last addVersion: version `at` is shown again, and next is gone.
export function removeVersion(chat, next, at) {
  const first = showVersion(chat, next, at);
  first.fork.tails.pop();
  if (first.fork.tails.length === 1) delete first.fork;
}

// ---- what is sent ------------------------------------------------------------------------------

const sizeOf = ({ content, reasoning }) => content.length + (reasoning?.length ?? 0);

// Index of the first message that still is part of what is sent.
export const firstSent = ({ messages }) =>
  Math.min(messages.findLast(({ from }) => from)?.from ?? 0, messages.length);

// The index of the first user's message from which at most half of the characters of
// messages[from..end) are left; or of the last one.
export function slide({ messages }, from, end) {
  const all = messages.slice(from, end).reduce((sum, message) => sum + sizeOf(message), 0);
  let left = all, found = from;
  for (let i = from; i < end; i++) {
    if (i > from && messages[i].role === "user") {
      found = i;
      if (left <= all / 2) break;
    }
    left -= sizeOf(messages[i]);
  }
  return found;
}

// A message's content: its text, or with images a list of parts.
function withImages(content, files = []) {
  const images = files.filter(({ image }) => image).map(({ image: url }) => ({ type: "image_url", image_url: { url } }));
  return images.length ? [...images, ...(content ? [{ type: "text", text: content }] : [])] : content;
}

export function toSend(messages, from, system) {
  const sent = messages.slice(from).map(({ role, content, reasoning, files }) => ({
    role, content: withImages(content, files), ...(reasoning && { reasoning_content: reasoning }),
  }));
  return system ? [{ role: "system", content: system }, ...sent] : sent;
}

// ---- attached files ----------------------------------------------------------------------------

const MAX_FILE_BYTES = 4 << 20;
const MAX_SIDE = 2048; // pixels, of an image that is drawn anew
const MAX_IMAGES = 24 << 20; // characters in a chat, all of which are sent

// A message's text, after the texts attached to it.
export function withFiles(text, files) {
  const parts = files.filter(({ image }) => !image).map(({ name, text: content }) => {
    const longest = (content.match(/`{3,}/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${content.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

// An image as a data URL: the file's own bytes, or if they are many or of another format, drawn anew.
async function readImage(file) {
  const bitmap = await createImageBitmap(file), { width, height } = bitmap;
  let blob = file;
  if (file.size > MAX_FILE_BYTES || !/^image\/(png|jpeg|webp)$/.test(file.type)) {
    const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
    const canvas = new OffscreenCanvas(Math.ceil(width * scale), Math.ceil(height * scale));
    const drawing = canvas.getContext("2d");
    drawing.fillStyle = "#fff"; // JPEG has no transparency
    drawing.fillRect(0, 0, canvas.width, canvas.height);
    drawing.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    blob = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 });
  }
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// {name, image} or {name, text} of a file; held: the files that the chat has. Throws an Error that says why it
// cannot be attached.
export async function readAttached(file, held) {
  if (/^image\/(?!svg)/.test(file.type)) {
    const image = await readImage(file).catch(() => {
      throw new Error(`${file.name} is not an image that this browser can read`);
    });
    const used = held.reduce((sum, other) => sum + (other.image?.length ?? 0), image.length);
    if (used <= MAX_IMAGES) return { name: file.name, image };
    throw new Error(`with ${file.name} this chat would have more than ${MAX_IMAGES >> 20} MiB of images: begin a new chat`);
  }
  if (file.type === "application/pdf")
    throw new Error(`${file.name}: attach a PDF's text (as pdftotext writes it), or pictures of its pages`);
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} is larger than ${MAX_FILE_BYTES >> 20} MiB`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // not text
  }
  throw new Error(`${file.name} is neither text nor an image`);
}

// ---- chats from files and from the store -------------------------------------------------------

// Readers return a value that is what they are named after, and throw otherwise.
function refuse() {
  throw new Error();
}
const when = (holds) => (value) => holds(value) ? value : refuse();
const text = when((value) => typeof value === "string");
const flag = when((value) => typeof value === "boolean");
const number = when(Number.isFinite);
const index = when((value) => Number.isSafeInteger(value) && value >= 0);
const list = (read) => (values) => Array.isArray(values) ? values.map((value, i) => read(value, i)) : refuse();

// An object of the fields that have readers. What is not needed may be missing.
const object = (needed, others = {}) => (raw) => {
  if (typeof raw !== "object") refuse();
  return Object.fromEntries(Object.entries({ ...needed, ...others }).flatMap(([name, read]) =>
    name in needed || raw[name] !== undefined ? [[name, read(raw[name])]] : []));
};

const image = when((value) => /^data:image\/(png|jpeg|webp);base64,[A-Za-z0-9+/]+=*$/.test(value));
const readFile = (raw) => object({ name: text, ...("image" in raw ? { image } : { text }) })(raw);

const readAny = object(
  { role: when((value) => ["user", "assistant"].includes(value)), content: text },
  { text, reasoning: text, model: text, error: text, finish: text, stopped: flag, interrupted: flag,
    thoughtSeconds: number, from: index, files: list(readFile),
    stats: object({ tokens: number, context: number, first: number, rate: number }), fork: readFork });

function readMessage(raw) {
  const message = readAny(raw);
  if (message.role === "assistant") message.reasoning ??= text(raw.reasoning_content ?? "");
  return message;
}

function readFork({ at, tails }) {
  const read = (tail, i) => i === at ? when((value) => value === null)(tail) : tail.length ? messages(tail) : refuse();
  return index(at) < tails.length ? { at, tails: list(read)(tails) } : refuse();
}

const messages = list(readMessage);
const readSettings = object({}, Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, text])));
const readFields = object({ messages }, { id: text, title: text, folder: text, created: number, updated: number });

// The chat that raw is, whatever raw is. Throws if any part of it is not what the page can show.
export function readChat(raw) {
  const chat = readFields({ ...raw, messages: raw.messages.filter(({ role }) => role !== "system") });
  if (raw.settings) chat.settings = { ...DEFAULTS, ...readSettings(raw.settings) };
  const first = chat.messages.find(({ role }) => role === "user")?.content;
  return { ...newChat(), title: titleOf(first ?? NEW_TITLE), ...chat };
}

// The chats in a file: as they are exported here, or of `tandem run`'s /save. Throws an Error.
export function readChats(text) {
  try {
    const raw = [JSON.parse(text)].flat();
    return raw.length ? raw.map(readChat) : refuse();
  } catch {
    throw new Error("No chats found, or some are damaged. Choose a file exported from this page.");
  }
}

// Those of what was stored that are chats.
export function readStored(all) {
  return all.flatMap((raw) => {
    try {
      return [readChat(raw)];
    } catch {
      return [];
    }
  });
}

export function titleOf(text) {
  const line = text.split("\n").find((part) => part.trim()) ?? text;
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

const found = (value, words) => value.toLowerCase().includes(words);

// Whether a word, in lower case, is in the chat or its folder's name.
export const mentions = (chat, words) =>
  [chat.title, chat.folder ?? ""].some((name) => found(name, words)) ||
  chat.messages.some(({ content }) => found(content, words));

// Where it is: {at, before, words, after} of the first message that has it; undefined: none has.
export function placeOf({ messages }, words) {
  const at = messages.findIndex(({ content }) => found(content, words));
  if (at < 0) return undefined;
  const { content } = messages[at], from = content.toLowerCase().indexOf(words), to = from + words.length;
  return { at, before: content.slice(Math.max(0, from - 30), from), words: content.slice(from, to),
           after: content.slice(to, to + 40) };
}

// The heading in the list of chats of what was last changed then.
export function dayOf(time, now = Date.now()) {
  const midnight = new Date(now).setHours(0, 0, 0, 0), day = 24 * 3600 * 1000;
  if (time >= midnight) return "Today";
  if (time >= midnight - day) return "Yesterday";
  if (time >= midnight - 6 * day) return "Last 7 days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
