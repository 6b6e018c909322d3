// Chats in IndexedDB, settings and drafts in localStorage, the API key for the life of the tab, or in
// localStorage if it is to be kept. Where the
// browser refuses to store, everything works until the page is closed, and onProblem is told why.
// Other tabs with the page announce what they store, so that none writes over what it has not seen.

const SETTINGS = "tandem.settings", KEY = "tandem.key", DRAFTS = "tandem.drafts", THEME = "tandem.theme";
const PRESETS = "tandem.presets", FOLDED = "tandem.folded";

export const DEFAULTS = {
  model: "", system: "", temperature: "", top_p: "", max_tokens: "", thinking: "", effort: "", top_k: "",
  min_p: "", repetition_penalty: "", seed: "", stop: "", schema: "",
};

function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

export class Store {
  #db = null;
  #onProblem;
  #tabs = new BroadcastChannel("tandem.chats");

  // onChange(id, chat): another tab has stored a chat, or removed it (undefined).
  constructor(onProblem, onChange) {
    this.#onProblem = onProblem;
    this.#tabs.onmessage = async ({ data: id }) => {
      if (this.#db) onChange(id, await done(this.#chats("readonly").get(id)));
    };
  }

  // All chats, the last changed first.
  async open() {
    try {
      const request = indexedDB.open("tandem", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
      this.#db = await done(request);
      const chats = await done(this.#chats("readonly").getAll());
      return chats.sort((a, b) => b.updated - a.updated);
    } catch (error) {
      this.#refused(error);
      return [];
    }
  }

  #chats(mode) {
    return this.#db.transaction("chats", mode).objectStore("chats");
  }

  #refused(error) {
    this.#onProblem(error?.name === "QuotaExceededError"
      ? "The browser's storage is full: delete or export chats. What is new is lost when the page is closed."
      : "The browser does not store chats here: export what should be kept.");
  }

  async save(chat) {
    if (!this.#db) return;
    try {
      // The transaction may fail after the request succeeded, for want of space.
      const transaction = this.#db.transaction("chats", "readwrite");
      transaction.objectStore("chats").put(chat);
      await new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onerror = transaction.onabort = () => reject(transaction.error);
      });
      this.#tabs.postMessage(chat.id);
      this.#onProblem("");
    } catch (error) {
      this.#refused(error);
    }
  }

  async remove(id) {
    if (!this.#db) return;
    try {
      await done(this.#chats("readwrite").delete(id));
      this.#tabs.postMessage(id);
    } catch (error) {
      this.#refused(error);
    }
  }

  #keep(name, value) {
    try {
      localStorage.setItem(name, JSON.stringify(value));
    } catch (error) {
      this.#refused(error);
    }
  }

  loadSettings() {
    return { ...DEFAULTS, ...load(SETTINGS, {}) };
  }

  saveSettings(settings) {
    this.#keep(SETTINGS, settings);
  }

  // The names of the folders whose chats are folded away.
  loadFolded() {
    return load(FOLDED, []);
  }

  saveFolded(names) {
    this.#keep(FOLDED, names);
  }

  // "": the system's, "light" or "dark".
  loadTheme() {
    try {
      return localStorage.getItem(THEME) ?? "";
    } catch {
      return "";
    }
  }

  saveTheme(theme) {
    try {
      if (theme) localStorage.setItem(THEME, theme);
      else localStorage.removeItem(THEME);
    } catch (error) {
      this.#refused(error);
    }
  }

  // Settings by the names under which they were kept.
  loadPresets() {
    return load(PRESETS, {});
  }

  savePresets(presets) {
    this.#keep(PRESETS, presets);
  }

  // {key, isKept}
  loadKey() {
    try {
      const kept = localStorage.getItem(KEY);
      return { key: kept ?? sessionStorage.getItem(KEY) ?? "", isKept: kept !== null };
    } catch {
      return { key: "", isKept: false };
    }
  }

  saveKey({ key, isKept }) {
    try {
      sessionStorage.setItem(KEY, key);
      if (isKept && key) localStorage.setItem(KEY, key);
      else localStorage.removeItem(KEY);
    } catch {
      // it stays in memory
    }
  }

  // What is being typed in a chat; id "": in a new one.
  loadDraft(id) {
    return load(DRAFTS, {})[id] ?? "";
  }

  saveDraft(id, text) {
    const { [id]: before, ...others } = load(DRAFTS, {});
    if ((before ?? "") === text) return;
    try {
      localStorage.setItem(DRAFTS, JSON.stringify(text ? { ...others, [id]: text } : others));
    } catch {
      // it stays in the box
    }
  }
}

// ---- export ------------------------------------------------------------------------------------

export function asMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  for (const { role, content, reasoning, files = [] } of chat.messages) {
    parts.push(role === "user" ? "## You" : "## Assistant");
    for (const { name, image } of files) if (image) parts.push(`*Image: ${name}*`);
    if (reasoning)
      parts.push(`<details><summary>Thoughts</summary>\n\n${reasoning.trim()}\n\n</details>`);
    parts.push(content.trim());
  }
  return parts.join("\n\n") + "\n";
}

export function asJson(chats) {
  return JSON.stringify(chats, null, 2) + "\n";
}

export function download(name, type, text) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(new Blob([text], { type }));
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
}
