// Messages as DOM nodes. A view keeps its nodes and changes what differs, so that a growing answer
// costs its last block and what is selected or unfolded stays so.

import { element, renderBlock, splitBlocks } from "./markdown.js";

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

function tool(label, action) {
  const button = element("button", "", label);
  button.type = "button";
  button.addEventListener("click", () => action(button));
  return button;
}

export function statistics(message) {
  const { stats } = message, parts = [];
  if (!stats) return "";
  parts.push(`${stats.tokens} tokens`);
  if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  parts.push(`first after ${stats.first.toFixed(2)} s`);
  return parts.join(" · ");
}

const waitingText = (seconds) =>
  `Processing the prompt…${seconds >= 2 ? ` ${Math.floor(seconds)} s` : ""}`;

// Why an answer is not whole; "" if it is.
function shortfall({ stopped, finish, interrupted }) {
  if (stopped) return "stopped";
  if (interrupted) return "the page was closed before the answer ended";
  return finish === "length" ? "cut at the limit of tokens" : "";
}

class UserView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = element("div", "body", message.content);
    this.tools = element("div", "tools", tool("Edit", () => this.edit()),
      tool("Copy", (button) => copyText(button, message.content)));
    this.node = element("article", "message user", element("h2", "who", "You"), this.body, this.tools);
  }

  update() {}

  edit() {
    const area = element("textarea", ""), form = element("form", "edit");
    area.value = this.message.content;
    area.rows = Math.min(12, area.value.split("\n").length + 1);
    area.setAttribute("aria-label", "Edit the message");
    const save = element("button", "", "Send again"), cancel = tool("Cancel", () => close());
    const close = () => {
      form.replaceWith(this.body, this.tools);
      this.tools.firstChild.focus();
    };
    form.append(area, element("div", "tools", save, cancel));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value.trim();
      close();
      if (text) this.actions.edit(this.message, text);
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
    this.tools.remove();
    this.body.replaceWith(form);
    area.focus();
  }
}

class AssistantView {
  #content = "";
  #blocks = []; // {source, nodes} of what is in body

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
    this.copy = tool("Copy", (button) => copyText(button, message.content));
    const tools = element("div", "tools", this.note, this.copy, this.retry);
    this.node = element("article", "message assistant", element("h2", "who", "Assistant"), this.thoughts,
      this.body, this.waiting, this.error, tools);
    this.update();
  }

  // run: what is known of the answer while it is generated.
  update(run) {
    const { message } = this, { reasoning, content, error } = message;
    this.thoughts.hidden = !reasoning;
    if (this.thoughtText.textContent !== reasoning) this.thoughtText.textContent = reasoning;
    const seconds = message.thoughtSeconds;
    this.summary.textContent = run && !content ? "Thinking…"
      : seconds >= 0.1 ? `Thought for ${seconds.toFixed(1)} s` : "Thoughts";
    this.#renderContent(content);
    this.waiting.hidden = !run || Boolean(content || reasoning);
    this.waiting.textContent = run ? waitingText((performance.now() - run.begin) / 1000) : "";
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.note.textContent = [statistics(message), run ? "" : shortfall(message)].filter(Boolean).join(" · ");
    this.note.hidden = !this.note.textContent;
    this.retry.hidden = this.copy.hidden = Boolean(run);
  }

  #renderContent(content) {
    if (content === this.#content) return;
    this.#content = content;
    const sources = splitBlocks(content);
    let same = 0;
    while (same < sources.length && this.#blocks[same]?.source === sources[same]) same++;
    for (const { nodes } of this.#blocks.splice(same))
      for (const node of nodes) node.remove();
    for (const source of sources.slice(same)) {
      const nodes = renderBlock(source);
      this.body.append(...nodes);
      this.#blocks.push({ source, nodes });
    }
  }
}

export function viewOf(message, actions) {
  return new (message.role === "user" ? UserView : AssistantView)(message, actions);
}
