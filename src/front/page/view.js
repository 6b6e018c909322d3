// Messages as DOM nodes. A view keeps its nodes and changes what differs, so that a growing answer
// costs its last block and what is selected or unfolded stays so.

import { element, renderBlock, splitBlocks } from "./markdown.js";

const SLICE = 50_000; // characters rendered at a time

export async function copyText(button, text) {
  const label = button.textContent;
  try {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(text);
    } else { // not a secure context, such as http on another machine
      const area = element("textarea", "hidden");
      area.value = text;
      document.body.append(area);
      area.select();
      const copied = document.execCommand("copy");
      area.remove();
      if (!copied) throw new Error();
    }
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not copied";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

export function tool(label, action) {
  const button = element("button", "", label);
  button.type = "button";
  button.addEventListener("click", () => action(button));
  return button;
}

export function statistics(message) {
  const { stats } = message, parts = [];
  if (!stats) return "";
  if (message.model) parts.push(message.model.split("/").pop());
  parts.push(`${stats.tokens} tokens`);
  if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  parts.push(`first after ${stats.first.toFixed(2)} s`);
  return parts.join(" · ");
}

const number = (value) => value.toLocaleString("en");

export function picture({ name, image }, alt = name) {
  const node = element("img", "picture");
  node.src = image;
  node.alt = alt;
  return node;
}

function fileView(file) {
  const { name, text } = file;
  if (file.image) return picture(file);
  const summary = element("summary", "", `${name} (${number(text.length)} characters)`);
  return element("details", "file", summary, element("div", "", text));
}

// The arrows between the versions of a message and of what follows it.
class Versions {
  constructor(message, actions) {
    const show = (step) => actions.show(message, message.fork.at + step);
    this.message = message;
    this.before = tool("‹", () => show(-1));
    this.after = tool("›", () => show(1));
    this.before.setAttribute("aria-label", "Previous version");
    this.after.setAttribute("aria-label", "Next version");
    this.count = element("span", "");
    this.node = element("span", "versions", this.before, this.count, this.after);
  }

  update(isBusy) {
    const { fork } = this.message;
    this.node.hidden = !fork;
    if (!fork) return;
    this.count.textContent = `${fork.at + 1} / ${fork.tails.length}`;
    this.before.disabled = isBusy || fork.at === 0;
    this.after.disabled = isBusy || fork.at === fork.tails.length - 1;
  }
}

// How far the prefill is, and how long it takes yet at the speed so far; or that the server is busy.
function waitingText({ begin, progress, again }) {
  if (again) return `The server is busy. Trying again in ${Math.max(0, Math.ceil((again - performance.now()) / 1000))} s`;
  const seconds = (performance.now() - begin) / 1000;
  if (!progress || progress.processed >= progress.total)
    return `Processing the prompt…${seconds >= 2 ? ` ${Math.floor(seconds)} s` : ""}`;
  const { total, cache, processed, time_ms: ms } = progress;
  const left = processed > cache && (total - processed) * ms / (processed - cache) / 1000;
  return `Processing the prompt: ${number(processed)} of ${number(total)} tokens` +
    (left ? `, about ${Math.ceil(left)} s left` : "");
}

// Why an answer is not whole; "" if it is.
function shortfall({ stopped, finish, interrupted }) {
  if (stopped) return "stopped";
  if (interrupted) return "the page was closed before the answer ended";
  return finish === "length" ? "cut at the limit of tokens" : "";
}

// A form in the place of nodes, to change a message's text. take(text) is called with what is not blank.
function editor(text, label, save, nodes, take) {
  const area = element("textarea", ""), form = element("form", "edit");
  area.value = text;
  area.rows = Math.min(12, text.split("\n").length + 1);
  area.setAttribute("aria-label", label);
  const close = () => {
    form.replaceWith(...nodes);
    nodes.at(-1).querySelector("button:not([hidden])")?.focus();
  };
  form.append(area, element("div", "tools", element("button", "", save), tool("Cancel", close)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    close();
    take(area.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  for (const node of nodes.slice(1)) node.remove();
  nodes[0].replaceWith(form);
  area.focus();
}

class UserView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = message.text ?? message.content; // without what is attached
    this.body = element("div", "body", ...(message.files ?? []).map(fileView), this.text);
    this.versions = new Versions(message, actions);
    this.tools = element("div", "tools", tool("Edit", () => this.edit()),
      tool("Copy", (button) => copyText(button, message.content)), this.versions.node);
    this.update();
    this.node = element("article", "message user", element("h2", "hidden", "You"), this.body, this.tools);
  }

  update(run, isBusy) {
    this.versions.update(isBusy);
  }

  edit() {
    editor(this.text, "Edit the message", "Send again", [this.body, this.tools], (text) => {
      if (text || this.message.files) this.actions.edit(this.message, text);
    });
  }
}

class AssistantView {
  #content = "";
  #blocks = []; // {source, nodes} of what is in body
  #later; // timer: what is still to be rendered

  constructor(message, actions) {
    this.message = message;
    this.summary = element("summary", "");
    this.thoughtText = element("div", "");
    this.thoughts = element("details", "thoughts", this.summary, this.thoughtText);
    this.body = element("div", "markdown");
    this.waiting = element("p", "waiting");
    this.error = element("p", "error");
    this.note = element("p", "note");
    this.retry = tool("Retry", () => actions.retry(message));
    this.more = tool("Continue", () => actions.goOn(message));
    this.change = tool("Edit", () => editor(message.content, "Edit the answer", "Save", [this.body, tools],
      (text) => text && actions.rewrite(message, text)));
    this.copy = tool("Copy", (button) => copyText(button, message.content));
    this.versions = new Versions(message, actions);
    const tools = element("div", "tools", this.note, this.more, this.copy, this.change, this.retry, this.versions.node);
    this.node = element("article", "message assistant", element("h2", "hidden", "Assistant"), this.thoughts,
      this.body, this.waiting, this.error, tools);
    this.update();
  }

  // run: what is known of the answer while it is generated.
  // isLast: nothing follows it.
  update(run, isBusy, isLast) {
    const { message } = this, { reasoning, content, error } = message;
    this.thoughts.hidden = !reasoning;
    if (this.thoughtText.textContent !== reasoning) this.thoughtText.textContent = reasoning;
    const seconds = message.thoughtSeconds;
    this.summary.textContent = run && !content ? "Thinking…"
      : seconds >= 0.1 ? `Thought for ${seconds.toFixed(1)} s` : "Thoughts";
    this.#renderContent(content);
    this.waiting.hidden = !run || (!run.again && Boolean(content || reasoning));
    this.waiting.textContent = run ? waitingText(run) : "";
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.note.textContent = [statistics(message), run ? "" : shortfall(message)].filter(Boolean).join(" · ");
    this.note.hidden = !this.note.textContent;
    this.retry.hidden = this.copy.hidden = Boolean(run);
    this.change.hidden = isBusy || !content;
    this.more.hidden = isBusy || !isLast || !content || !(shortfall(message) || error);
    this.versions.update(isBusy);
  }

  #renderContent(content) {
    if (content === this.#content) return;
    this.#content = content;
    const sources = splitBlocks(content);
    let same = 0;
    while (same < sources.length && this.#blocks[same]?.source === sources[same]) same++;
    for (const { nodes } of this.#blocks.splice(same))
      for (const node of nodes) node.remove();
    clearTimeout(this.#later);
    this.#append(sources, same);
  }

  // In slices, between which the page reacts.
  #append(sources, from) {
    let n = 0, at = from;
    for (; at < sources.length && n < SLICE; at++) {
      const source = sources[at], nodes = renderBlock(source);
      for (const node of nodes) this.body.append(node);
      this.#blocks.push({ source, nodes });
      n += source.length;
    }
    if (at < sources.length) this.#later = setTimeout(() => this.#append(sources, at), 0);
  }
}

export function viewOf(message, actions) {
  return new (message.role === "user" ? UserView : AssistantView)(message, actions);
}
