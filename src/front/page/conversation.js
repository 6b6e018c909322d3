// Chats as data: versions of messages, what of a chat is sent, and chats from files.
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

export function toSend(messages, from, system) {
  const sent = messages.slice(from).map(({ role, content, reasoning }) => ({
    role, content, ...(reasoning && { reasoning_content: reasoning }),
  }));
  return system ? [{ role: "system", content: system }, ...sent] : sent;
}

// ---- attached texts ----------------------------------------------------------------------------

const MAX_FILE_BYTES = 4 << 20;

// A message's text, after the texts attached to it.
export function withFiles(text, files) {
  const parts = files.map(({ name, text: content }) => {
    const longest = Math.max(2, ...(content.match(/`{3,}/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${content.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

// {name, text} of a file. Throws an Error that says why it cannot be attached.
export async function readTextFile(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} is larger than ${MAX_FILE_BYTES >> 20} MiB`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // it is no text
  }
  throw new Error(`${file.name} is no text file: only text can be attached`);
}

// ---- chats from files --------------------------------------------------------------------------

const KEPT = { content: "string", reasoning: "string", text: "string", model: "string", error: "string",
               finish: "string", stopped: "boolean", thoughtSeconds: "number", from: "number" };

const isText = (value) => typeof value === "string";

function readMessage(raw) {
  if (!["user", "assistant"].includes(raw?.role) || !isText(raw.content)) throw new Error();
  const message = { role: raw.role, ...(raw.role === "assistant" && { reasoning: raw.reasoning_content ?? "" }) };
  for (const [name, type] of Object.entries(KEPT))
    if (typeof raw[name] === type) message[name] = raw[name];
  const { stats, files, fork } = raw;
  if (stats && ["tokens", "context", "first", "rate"].every((name) => Number.isFinite(stats[name])))
    message.stats = { tokens: stats.tokens, context: stats.context, first: stats.first, rate: stats.rate };
  if (Array.isArray(files) && files.every(({ name, text }) => isText(name) && isText(text)))
    message.files = files.map(({ name, text }) => ({ name, text }));
  if (Array.isArray(fork?.tails) && fork.tails[fork.at] === null)
    message.fork = { at: fork.at, tails: fork.tails.map((tail) => tail && tail.map(readMessage)) };
  return message;
}

const readSettings = (raw) => Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) =>
  [name, isText(raw[name]) ? raw[name] : value]));

// The chats in a file: as they are exported here, or of `tandem run`'s /save. Throws an Error.
export function readChats(text) {
  let raw;
  try {
    raw = [JSON.parse(text)].flat();
    if (!raw.length) throw new Error();
    return raw.map(({ id, title, created, updated, messages, settings }) => {
      const own = messages.filter(({ role }) => role !== "system").map(readMessage);
      const time = (value) => (Number.isFinite(value) ? value : Date.now());
      const first = own.find(({ role }) => role === "user")?.content;
      return { ...newChat(), ...(isText(id) && { id }), title: isText(title) ? title : titleOf(first ?? NEW_TITLE),
               created: time(created), updated: time(updated), messages: own,
               ...(settings && { settings: readSettings(settings) }) };
    });
  } catch {
    throw new Error("There are no chats in this file: choose one that was exported here.");
  }
}

export function titleOf(text) {
  const line = text.split("\n").find((part) => part.trim()) ?? text;
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

const found = (value, words) => value.toLowerCase().includes(words);

// Whether a word, in lower case, is in the chat.
export const mentions = (chat, words) =>
  found(chat.title, words) || chat.messages.some(({ content }) => found(content, words));
