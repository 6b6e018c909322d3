"""The chat page in a browser: what is shown, kept, stopped and copied, and that it is accessible.

Needs Debian's chromium; without it these tests are skipped. The model says what its scripts tell it
(scripted_model.py); answers that must stay unfinished for a while come from Gate, in front of it.
With PAGE_SHOTS=DIR pictures of the page are left there.
"""

import base64
import http.client
import json
import os
import queue
import re
import shutil
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from scripted_model import write_model
from serving import Server

pytestmark = pytest.mark.no_asan

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if not CHROMIUM:
    pytest.skip("no chromium: scripts/setup.sh --test installs it", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
expect = api.expect
expect.set_options(timeout=60_000)  # milliseconds; a machine that tests is slow

MARKDOWN = """# Sorting

A *short* answer with **bold**, `code`, ~~gone~~, [a link](https://example.org/a) and \
[a trap](javascript:alert(1)).

1. first
   - inner *item*
2. second

| name | speed |
|:-----|------:|
| quick `a\\|b` | 12 |
| merge | **9** |

> quoted

```python
def quick(items):
    if len(items) < 2:
        return items
    pivot, *rest = items
    return quick([x for x in rest if x < pivot]) + [pivot] + quick([x for x in rest if x >= pivot])
```

```python
pass
```

<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>
Done."""

SCRIPTS = {
    "hello": "Good morning to you.",
    "ponder": "<think>It depends,\nI should think.</think>\n\nYes indeed.",
    "sort": MARKDOWN,
    "Summarize": "They greet each other.",
    "Summary": "I see.",
}


STORED_CHATS = """new Promise((resolve) => {
    indexedDB.open("tandem").onsuccess = ({ target: { result: db } }) => {
        db.transaction("chats").objectStore("chats").getAll().onsuccess = ({ target }) => {
            db.close();
            resolve(target.result);
        };
    };
})"""


@pytest.fixture(scope="module")
def server(tandem_bin, tmp_path_factory):
    model = tmp_path_factory.mktemp("page") / "scripted"
    write_model(model, SCRIPTS, generation_eos=["<|im_end|>"])
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    begin = "{" + ", ".join(f"'{name}': '<|{name}|>'" for name in SCRIPTS) + "}"
    config["chat_template"] = (
        "{%- for m in messages -%}{{- m.content -}}{%- endfor -%}{%- set begin = " + begin
        + " -%}{{- begin[messages[-1].content.split()[0]] -}}")
    path.write_text(json.dumps(config))
    running = Server(tandem_bin, model)
    yield running
    running.close()


class Gate(ThreadingHTTPServer):
    """Passes everything on to the server, but for messages that begin with "slow": their answers are
    the pieces that say() gives. Keeps the bodies of requests."""

    daemon_threads = True

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), GateHandler)
        self.server_port_behind = port
        self.pieces = queue.Queue()
        self.asked = []
        self.health = None  # (status, body) of /health instead of the server's
        self.models = None  # cards of /v1/models instead of the server's
        self.refuses = False  # messages, with 503
        self.busy = 0  # so many are refused for a second
        self.continued = None  # what a message that goes on goes on with
        self.title = None  # what is answered where a title is asked for
        self.key = None  # what /v1/models asks for
        self.refuse_now = threading.Event()  # before it is set, nobody hears that a key is wrong
        self.refuse_now.set()
        self.is_asked = threading.Event()  # with a wrong key, of which it does not hear yet
        self.gone = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def say(self, *pieces):
        for piece in pieces:
            self.pieces.put(piece)


class GateHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.handle_any(b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(body)
        self.server.asked.append(asked)
        if self.server.refuses:
            self.answer(503, {"error": {"message": "the worker is restarting"}})
        elif self.server.busy:
            self.server.busy -= 1
            self.answer(429, {"error": {"message": "the queue is full"}}, {"Retry-After": "1"})
        elif self.server.title and asked["messages"][-1]["content"].startswith("Give this conversation a title"):
            self.server.say(self.server.title, None)
            self.answer_slowly()
        elif asked.get("continue_final_message"):
            self.server.say(self.server.continued, None)
            self.answer_slowly()
        elif isinstance(asked["messages"][-1]["content"], list) or asked["messages"][-1]["content"].startswith("slow"):
            self.answer_slowly()
        else:
            self.handle_any(body)

    def answer_slowly(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            while (piece := self.server.pieces.get()) is not None:
                if isinstance(piece, dict):
                    self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
                    continue
                self.wfile.write(f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.gone.set()

    def answer(self, status, data, headers={}):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def handle_any(self, body):
        if self.path == "/health" and self.server.health:
            return self.answer(*self.server.health)
        if self.path in ("/v1/models", "/metrics"):
            if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
                if not self.server.refuse_now.is_set():
                    self.server.is_asked.set()
                self.server.refuse_now.wait()
                return self.answer(401, {"error": {"message": "no such key"}})
            if self.server.models and self.path != "/metrics":
                return self.answer(200, {"data": self.server.models})
        behind = http.client.HTTPConnection("127.0.0.1", self.server.server_port_behind)
        headers = {"Content-Type": "application/json"} if body else {}
        behind.request(self.command, self.path, body or None, headers)
        response = behind.getresponse()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.end_headers()
        try:
            while data := response.read1(65536):
                self.wfile.write(data)
        except OSError:
            pass


@pytest.fixture
def gate(server):
    running = Gate(server.port)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.say(None)
    running.refuse_now.set()
    running.shutdown()
    running.server_close()


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser, gate):
    """Opens the page; a message on the console, such as a breach of the policy, fails the test."""
    contexts, complaints = [], []

    def open_one(model="scripted", **options):
        context = browser.new_context(**options)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: complaints.append(str(e)))
        page.goto(gate.url)
        expect(page.locator("#model")).to_have_text(model)
        return page

    yield open_one
    for context in contexts:
        context.close()
    refused = [c for c in complaints if "status of 4" not in c and "status of 5" not in c]
    assert not refused, refused


def reload(page):
    """Behind what the page has begun to save: a read of the store waits for the writes before it."""
    page.evaluate(STORED_CHATS)
    page.reload()


def ask(page, text):
    page.fill("#input", text)
    page.press("#input", "Enter")


def asked(page, text):
    """Asks, and waits for the whole answer; returns it."""
    before = page.locator(".assistant").count()
    ask(page, text)
    expect(page.locator(".assistant")).to_have_count(before + 1)
    expect(page.locator("#send")).to_have_text("Send")
    return page.locator(".assistant").last


def shoot(page, name):
    if "PAGE_SHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["PAGE_SHOTS"]) / f"{name}.png")


def check_accessible(page):
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_markdown_is_shown_and_never_run(open_page):
    page = open_page()
    answer = asked(page, "sort a list")
    body = answer.locator(".markdown")
    expect(body.locator("h2")).to_have_text("Sorting")
    assert [e.inner_text() for e in body.locator("p > em, p > strong, p > code, p > s").all()] == \
        ["short", "bold", "code", "gone"]
    assert body.locator("p a").all()[0].get_attribute("href") == "https://example.org/a"
    assert body.locator("a").count() == 1 and "[a trap](javascript:alert(1))" in body.inner_text()
    expect(body.locator("ol > li")).to_have_count(2)
    expect(body.locator("ol > li > ul > li > em")).to_have_text("item")
    expect(body.locator("td").nth(1)).to_have_class("to-right")
    expect(body.locator("blockquote")).to_have_text("quoted")
    assert "<script>window.hacked = 1</script>" in body.inner_text()
    assert page.evaluate("window.hacked") is None
    code = MARKDOWN.split("```python\n")[1].split("\n```")[0]
    assert body.locator("pre code").all_text_contents() == [code, "pass"]
    body.get_by_role("button", name="Copy").first.click()
    expect(body.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == code
    expect(answer.locator(".note")).to_contain_text(re.compile(r"\d+ tokens · [\d.]+ tokens/s"))
    expect(page.locator("#context-text")).to_have_text(re.compile(r"^[\d,]+ / 4,096$"))
    shoot(page, "light")
    check_accessible(page)


def test_thoughts_are_folded_and_kept(open_page, gate):
    page = open_page(color_scheme="dark")
    answer = asked(page, "ponder")
    thoughts = answer.locator("details.thoughts")
    expect(answer.locator(".markdown")).to_have_text("Yes indeed.")
    expect(thoughts.locator("div")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("div")).to_have_text("It depends,\nI should think.", use_inner_text=True)
    check_accessible(page)
    shoot(page, "dark")
    asked(page, "hello")
    sent = gate.asked[-1]["messages"]
    assert sent[1] == {"role": "assistant", "content": "Yes indeed.",
                       "reasoning_content": "It depends,\nI should think."}
    reload(page)
    expect(page.locator(".thoughts div").first).to_have_text("It depends,\nI should think.")


# Chats are there when the test calls letOpen().
SLOW_STORE = """
    const mayOpen = new Promise((resolve) => { window.letOpen = resolve; }), { open } = IDBFactory.prototype;
    IDBFactory.prototype.open = function (...args) {
        const request = open.apply(this, args);
        Object.defineProperty(request, "onsuccess", {
            set: (then) => request.addEventListener("success", (event) => mayOpen.then(() => then(event))) });
        return request;
    };"""


PIXELS = Path(__file__).parents[1] / "fuzz/corpus/fuzz_image"


def test_images_are_attached(open_page, gate, tmp_path):
    page = open_page()
    png, webp = (PIXELS / "png_rgb").read_bytes(), (PIXELS / "webp_alpha").read_bytes()
    page.set_input_files("#attach-input", [
        {"name": "a.png", "mimeType": "image/png", "buffer": png},
        {"name": "broken.png", "mimeType": "image/png", "buffer": png[:50]}])
    expect(page.locator("#reason")).to_contain_text("broken.png is not an image")
    page.evaluate("""(bytes) => { const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], "b.bmp", { type: "image/bmp" }));
        document.getElementById("input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true }));
        data.items.clear();
        data.items.add(new File([new Uint8Array(%s)], "c.webp", { type: "image/webp" }));
        document.getElementById("content").dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true })); }"""
                  % list(webp), list(bmp(3000, 2)))
    expect(page.locator("#files img")).to_have_count(3)
    check_accessible(page)
    shoot(page, "images")
    page.get_by_label("Remove c.webp").click()
    gate.say("Two pictures.", None)
    assert asked(page, "what is this?").locator(".markdown").inner_text() == "Two pictures."
    first, second, words = gate.asked[-1]["messages"][0]["content"]
    assert base64.b64decode(first["image_url"]["url"].removeprefix("data:image/png;base64,"), validate=True) == png
    assert words == {"type": "text", "text": "what is this?"}
    drawn = base64.b64decode(second["image_url"]["url"].removeprefix("data:image/jpeg;base64,"), validate=True)
    frame = drawn.index(b"\xff\xc0")  # drawn anew, no larger than 2048 pixels
    assert struct.unpack(">HH", drawn[frame + 5:frame + 9]) == (2, 2048)
    page.reload()
    expect(page.locator(".user img")).to_have_count(2)
    gate.say("Still two.", None)
    assert asked(page, "slow again").locator(".markdown").inner_text() == "Still two."
    assert gate.asked[-1]["messages"][0]["content"] == [first, second, words]
    with page.expect_download() as download:
        page.click("#more summary")
        page.click("#export-json")
    other = open_page()
    other.click("#open-settings")
    other.set_input_files("#import-input", download.value.path())
    expect(other.locator(".user img")).to_have_count(2)
    large = [{"name": "large.png", "mimeType": "image/png", "buffer": png + bytes(3 << 20)}] * 7
    for one in large:  # what follows a PNG's end is nobody's
        other.set_input_files("#attach-input", one)
    expect(other.locator("#reason")).to_contain_text("more than 24 MiB of images: begin a new chat")
    expect(other.locator("#files img")).to_have_count(5)


def bmp(width, height):
    pixels = bytes((3 * width + 3) // 4 * 4 * height)
    return struct.pack("<2sIIIIiiHHIIiiII", b"BM", 54 + len(pixels), 0, 54, 40, width, height, 1, 24, 0, len(pixels),
                       0, 0, 0, 0) + pixels


def test_it_is_usable_before_the_chats_are_there(open_page, gate):
    page = open_page()
    asked(page, "hello")
    expect(page.locator("#title")).to_have_text("hello")
    page.evaluate(STORED_CHATS)
    page.add_init_script(SLOW_STORE)
    page.reload()
    page.locator("#input").press_sequentially("pon")  # these are no errors
    page.keyboard.press("Escape")
    page.click("#open-settings")
    page.keyboard.press("Escape")
    page.set_input_files("#attach-input", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    page.get_by_role("button", name="Remove a.txt").click()
    page.locator("#input").press_sequentially("der")
    page.evaluate("letOpen()")
    expect(page.locator("#chats button")).to_have_text(["hello"])
    expect(page.locator("#input")).to_have_value("ponder")  # and the chat is still the new one
    expect(page.locator(".message")).to_have_count(0)
    page.fill("#input", "")
    page.reload()
    asked(page, "ponder")
    page.evaluate("letOpen()")
    expect(page.locator("#chats button")).to_have_text(["ponder", "hello"])
    expect(page.locator(".assistant .markdown")).to_have_text("Yes indeed.")
    assert len(page.evaluate(STORED_CHATS)) == 2
    page.reload()
    page.evaluate("letOpen()")
    expect(page.locator("#title")).to_have_text("ponder")  # nothing was done: the one shown last


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_an_answer_can_be_stopped(open_page, gate, way):
    page = open_page()
    ask(page, "slow")
    gate.say("Once upon", " a time")
    expect(page.locator(".assistant .markdown")).to_have_text("Once upon a time")
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".assistant .note")).to_contain_text("stopped")
    while not gate.gone.is_set():  # the request was given up, not only hidden
        gate.say("!")
        gate.gone.wait(0.05)
    expect(page.locator(".assistant .markdown")).to_have_text("Once upon a time")


def test_stopped_before_it_began(open_page, gate):
    page = open_page()
    asked(page, "hello")
    ask(page, "slow question")
    expect(page.locator(".assistant .waiting").last).to_contain_text("Processing the prompt")
    progress = {"total": 10000, "cache": 1000, "processed": 4000, "time_ms": 2000}
    gate.say({"choices": [{"delta": {"role": "assistant", "content": None}}], "prompt_progress": progress})
    expect(page.locator(".assistant .waiting").last).to_have_text(
        "Processing the prompt: 4,000 of 10,000 tokens, about 4 s left")
    page.keyboard.press("Escape")
    expect(page.locator("#input")).to_have_value("slow question")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator("#reason")).to_be_hidden()


def test_an_answer_belongs_to_its_chat(open_page, gate):
    page = open_page()
    ask(page, "slow one")
    gate.say("Begun")
    expect(page.locator(".assistant .markdown")).to_have_text("Begun")
    page.click("#new-chat")
    expect(page.locator(".message")).to_have_count(0)
    assert "Good morning" in asked(page, "hello").inner_text()
    gate.say(" and ended.", None)
    chats = page.locator("#chats button")
    expect(chats).to_have_count(2)
    expect(page.locator("#chats .busy")).to_have_count(0)
    expect(page.locator(".assistant")).to_have_count(1)
    expect(page.locator(".assistant .markdown")).to_have_text("Good morning to you.")
    page.locator("#chats").get_by_role("button", name="slow one").click()
    expect(page.locator(".assistant .markdown")).to_have_text("Begun and ended.")
    reload(page)  # both are kept
    expect(page.locator(".assistant .markdown")).to_have_text("Begun and ended.")
    expect(chats).to_have_count(2)


def test_two_tabs_see_each_other(open_page):
    first = open_page()
    asked(first, "hello")
    second = first.context.new_page()
    second.goto(first.url)
    second.locator("#chats button").click()
    asked(second, "ponder")
    expect(first.locator(".message")).to_have_count(4)  # without reloading
    asked(first, "hello")
    expect(second.locator(".message")).to_have_count(6)
    second.click("#more summary")
    second.click("#delete")
    second.click("#ask-ok")
    expect(first.locator("#chats button")).to_have_count(0)


def test_one_tab_answers_at_a_time(open_page, gate):
    first = open_page()
    asked(first, "hello")
    second = first.context.new_page()
    second.goto(first.url)
    second.locator("#chats button").click()
    ask(first, "slow one")
    gate.say("Well")
    expect(first.locator(".assistant").last).to_contain_text("Well")
    ask(second, "ponder")
    expect(second.locator("#reason")).to_contain_text("answered in another tab")
    expect(second.locator("#input")).to_have_value("ponder")
    gate.say(", yes", None)
    expect(second.locator(".assistant").last).to_contain_text("Well, yes")  # nothing is lost
    second.click("#send")
    expect(first.locator(".message")).to_have_count(6)


def test_an_answer_goes_on_where_it_was_cut(open_page, gate):
    page = open_page()
    ask(page, "slow one")
    gate.say("one two", {"choices": [{"delta": {}, "finish_reason": "length"}]}, None)
    expect(page.locator(".assistant .note")).to_contain_text("cut at the limit")
    gate.continued = " three"
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".assistant .markdown")).to_have_text("one two three")
    body = gate.asked[-1]
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert body["messages"][-1] == {"role": "assistant", "content": "one two"}
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()
    reload(page)
    expect(page.locator(".assistant .markdown")).to_have_text("one two three")


def test_an_answer_is_edited(open_page, gate):
    page = open_page()
    asked(page, "hello")
    page.locator(".assistant").get_by_role("button", name="Edit").click()
    page.fill(".edit textarea", "Good **evening**.")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .markdown")).to_have_text("Good evening.")
    expect(versions(page, ".assistant")).to_have_text("‹2 / 2›")
    asked(page, "ponder")
    assert [m["content"] for m in gate.asked[-1]["messages"]] == ["hello", "Good **evening**.", "ponder"]
    page.press("#input", "ArrowUp")  # the last message again
    expect(page.locator(".edit textarea")).to_have_value("ponder")
    page.keyboard.press("Escape")
    expect(page.locator(".edit")).to_have_count(0)


def test_a_busy_server_is_waited_for(open_page, gate):
    page = open_page()
    gate.busy = 1
    ask(page, "hello")
    expect(page.locator(".waiting")).to_contain_text("The server is busy. Trying again in")
    expect(page.locator(".assistant .markdown")).to_have_text("Good morning to you.")
    assert len(gate.asked) == 2
    gate.busy = 100
    ask(page, "ponder")
    expect(page.locator(".waiting").last).to_contain_text("Trying again")
    page.keyboard.press("Escape")
    expect(page.locator("#input")).to_have_value("ponder")


def versions(page, who, nth=0):
    return page.locator(who).nth(nth).locator(".versions")


def test_edit_and_retry_make_versions(open_page, gate):
    page = open_page()
    asked(page, "hello")
    asked(page, "ponder")
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    page.fill(".edit textarea", "hello again")
    page.keyboard.press("Enter")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".user .body")).to_have_text("hello again")
    expect(page.locator("#send")).to_have_text("Send")
    page.locator(".assistant").get_by_role("button", name="Retry").click()
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".assistant .markdown")).to_have_text("Good morning to you.")
    assert [m["content"] for m in gate.asked[-1]["messages"]] == ["hello again"]
    assert len(gate.asked) == 4
    expect(versions(page, ".user")).to_have_text("‹2 / 2›")
    expect(versions(page, ".assistant")).to_have_text("‹2 / 2›")
    check_accessible(page)
    shoot(page, "versions")
    versions(page, ".user").get_by_label("Previous version").click()
    expect(page.locator(".message")).to_have_count(4)
    expect(versions(page, ".user")).to_have_text("‹1 / 2›")
    expect(versions(page, ".user").get_by_label("Next version")).to_be_focused()
    expect(versions(page, ".assistant")).to_be_hidden()
    reload(page)  # all are kept
    expect(page.locator(".user .body").first).to_have_text("hello")
    asked(page, "ponder again")
    assert [m["content"] for m in gate.asked[-1]["messages"]][::2] == ["hello", "ponder", "ponder again"]
    versions(page, ".user").get_by_label("Next version").click()
    expect(page.locator(".message")).to_have_count(2)
    versions(page, ".assistant").get_by_label("Previous version").click()
    expect(versions(page, ".assistant")).to_have_text("‹1 / 2›")
    gate.refuses = True  # a version that does not come about is none
    page.locator(".assistant").get_by_role("button", name="Retry").click()
    expect(page.locator("#reason")).to_contain_text("worker is restarting")
    expect(versions(page, ".assistant")).to_have_text("‹1 / 2›")
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    page.fill(".edit textarea", "hello once more")
    page.keyboard.press("Enter")
    expect(page.locator("#input")).to_have_value("hello once more")
    expect(versions(page, ".user")).to_have_text("‹2 / 2›")
    gate.refuses = False
    expect(page.locator("#reason")).to_be_hidden()  # the server is well again
    page.click("#send")
    expect(page.locator(".message")).to_have_count(4)


def test_a_full_chat_goes_on(open_page, gate):
    """The context of 4,096 tokens, of a letter each, holds two of these messages."""
    page = open_page()
    for letter in "abcd":
        asked(page, "hello " + letter * 1500)
    sent = [[m["content"][6] for m in a["messages"] if m["role"] == "user"] for a in gate.asked]
    assert sent[:2] == [["a"], ["a", "b"]] and sent[-1] == ["c", "d"]
    sent_last = gate.asked[-1]["messages"]
    expect(page.locator(".message")).to_have_count(8)
    expect(page.locator(".fallen")).to_contain_text("no longer fit")
    assert page.locator("#messages > *").nth(4).get_attribute("class") == "fallen"
    check_accessible(page)
    shoot(page, "full")
    reload(page)
    expect(page.locator(".fallen")).to_be_visible()
    page.get_by_role("button", name="Continue in a new chat with a summary").click()
    expect(page.locator("#files li")).to_have_text(re.compile("^Summary of “hello a+…” .22 characters. ✕$"))
    assert gate.asked[-1]["messages"][:-1] == [*sent_last, {"role": "assistant", "content": "Good morning to you."}]
    expect(page.locator(".message")).to_have_count(0)
    assert asked(page, "and then?").locator(".markdown").inner_text() == "I see."
    assert "\n```\nThey greet each other.\n```\n\nand then?" in gate.asked[-1]["messages"][0]["content"]


def test_texts_are_attached(open_page, gate, tmp_path):
    page = open_page()
    (tmp_path / "hello .py").write_text("print(1)\n```\n")
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\xff")
    page.set_input_files("#attach-input", [tmp_path / "hello .py", tmp_path / "picture.bin"])
    expect(page.locator("#files button")).to_have_text("hello .py (13 characters) ✕")
    expect(page.locator("#reason")).to_contain_text("picture.bin is neither text nor an image")
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.7\n")
    page.set_input_files("#attach-input", [tmp_path / "paper.pdf"])
    expect(page.locator("#reason")).to_contain_text("paper.pdf: attach a PDF's text")
    page.evaluate("""() => { const data = new DataTransfer(); data.setData("text/plain", "y".repeat(5000));
        document.getElementById("input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true })); }""")
    expect(page.locator("#files button")).to_have_count(2)
    check_accessible(page)
    shoot(page, "attached")
    page.get_by_label("Remove Pasted text").click()
    expect(page.locator("#files button")).to_have_count(1)
    gate.refuses = True
    ask(page, "what is this?")
    expect(page.locator("#reason")).to_contain_text("worker is restarting")
    expect(page.locator("#files button")).to_have_count(1)
    expect(page.locator("#input")).to_have_value("what is this?")
    gate.refuses = False
    assert "Good morning" in asked(page, "what is this?").inner_text()
    assert gate.asked[-1]["messages"][0]["content"] == "hello .py:\n````\nprint(1)\n```\n````\n\nwhat is this?"
    message = page.locator(".user")
    expect(message.locator(".body")).to_contain_text("what is this?")
    message.locator(".file summary").click()
    expect(message.locator(".file div")).to_have_text("print(1)\n```\n", use_inner_text=False)
    message.get_by_role("button", name="Edit").click()
    expect(page.locator(".edit textarea")).to_have_value("what is this?")
    page.fill(".edit textarea", "and this?")
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_have_text("Send")
    assert gate.asked[-1]["messages"][0]["content"].endswith("````\n\nand this?")


def test_drafts_and_search(open_page):
    page = open_page()
    asked(page, "hello sun")
    page.fill("#input", "half a thought")
    page.click("#new-chat")
    expect(page.locator("#input")).to_have_value("")
    asked(page, "ponder the moon")
    page.fill("#input", "another half")
    reload(page)
    expect(page.locator("#input")).to_have_value("another half")
    page.locator("#chats").get_by_role("button", name="hello sun").click()
    expect(page.locator("#input")).to_have_value("half a thought")
    expect(page.locator("#chats .day")).to_have_text(["Today"])
    page.fill("#search", "GOOD morn")  # what was answered, whatever the case
    expect(page.locator("#chats button span")).to_have_text(["hello sun"])
    expect(page.locator("#chats mark")).to_have_text("Good morn")
    page.click("#chats button")
    expect(page.locator(".found")).to_have_text(re.compile("Good morning"))
    page.fill("#search", "moon")
    expect(page.locator("#chats button span")).to_have_text(["ponder the moon"])
    page.fill("#search", "mars")
    expect(page.locator("#chats li")).to_have_text("No chat has these words.")
    page.fill("#search", "")
    expect(page.locator("#chats button")).to_have_count(2)


def test_folders(open_page):
    page = open_page()
    for text in ("hello sun", "hello moon", "ponder the stars"):
        page.click("#new-chat")
        asked(page, text)

    def move(chat, folder, choice=None):
        page.locator("#chats").get_by_role("button", name=chat).click()
        page.click("#more summary")
        page.click("#move")
        if choice is None:
            page.fill("#ask-input", folder)
            page.keyboard.press("Enter")
        else:
            page.locator("#ask-choices").get_by_role("button", name=choice, exact=True).click()

    move("hello sun", " Sky ")
    folders = page.locator("#chats summary")
    expect(folders).to_have_text(["Sky (1)"])
    move("hello moon", "", "Sky")
    move("ponder the stars", "a <b>far</b> one")
    expect(folders).to_have_text(["a <b>far</b> one (1)", "Sky (2)"])  # as text, by the alphabet
    expect(page.locator("#chats .day")).to_have_count(0)
    expect(page.locator("#chats details button")).to_have_text(["ponder the stars", "hello moon", "hello sun"])
    folders.last.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#chats button").get_by_text("hello")).to_have_count(2)
    for name in ("hello sun", "hello moon"):
        expect(page.locator("#chats button", has_text=name)).to_be_hidden()
    reload(page)  # the folders, and that one is folded, are kept
    expect(folders).to_have_text(["a <b>far</b> one (1)", "Sky (2)"])
    expect(page.locator("#chats button", has_text="hello sun")).to_be_hidden()
    expect(page.locator("#chats button", has_text="ponder")).to_be_visible()
    check_accessible(page)
    shoot(page, "folders")
    page.fill("#search", "moon")  # a search unfolds
    expect(folders).to_have_text(["Sky (1)"])
    expect(page.locator("#chats button")).to_be_visible()
    page.fill("#search", "sky")  # a folder's name finds its chats
    expect(page.locator("#chats button span")).to_have_text(["hello moon", "hello sun"])
    page.locator("#chats button", has_text="hello sun").click()
    page.fill("#search", "")
    expect(page.locator("#chats button", has_text="hello sun")).to_be_hidden()
    folders.last.click()
    move("hello sun", "", "No folder")
    expect(folders.last).to_have_text("Sky (1)")
    expect(page.locator("#chats > li > button")).to_have_text(["hello sun"])
    reload(page)
    expect(folders.last).to_have_text("Sky (1)")
    assert {c["title"]: c.get("folder") for c in page.evaluate(STORED_CHATS)} == {
        "hello sun": "", "hello moon": "Sky", "ponder the stars": "a <b>far</b> one"}
    page.click("#open-settings")
    with page.expect_download() as download:
        page.click("#export-all")
    page.keyboard.press("Escape")
    other = open_page(viewport={"width": 390, "height": 780}, has_touch=True, is_mobile=True)
    other.click("#open-settings")
    other.set_input_files("#import-input", download.value.path())
    other.click("#menu")
    folders = other.locator("#chats summary")
    expect(folders).to_have_text(["a <b>far</b> one (1)", "Sky (1)"])
    folders.first.tap()
    expect(other.locator("#chats button", has_text="ponder")).to_be_hidden()
    folders.first.tap()
    shoot(other, "phone-folders")
    other.locator("#chats button", has_text="ponder").tap()
    other.tap("#more summary")
    other.tap("#move")
    check_accessible(other)
    shoot(other, "phone-move")
    other.locator("#ask-choices").get_by_role("button", name="Sky", exact=True).tap()
    expect(folders).to_have_text(["Sky (2)"])


# Fields of a message that is none, of which nothing may be kept.
DAMAGED = [{"role": "tool"}, {"content": None}, {"reasoning_content": 1}, {"reasoning": 1}, {"error": {}},
           {"files": [{"name": "a"}]}, {"files": [{"name": "a", "image": "https://example.org/a.png"}]},
           {"stats": {"rate": "1"}}, {"from": -1}, {"stopped": 1},
           *({"fork": fork} for fork in (1, {"at": 9}, {"at": 9, "tails": [None]}, {"at": 0, "tails": [None, []]},
                                         {"at": 0, "tails": [None, [{"role": "user"}]]}, {"at": "0", "tails": [None]}))]


def test_what_was_exported_is_imported(open_page, tmp_path):
    page = open_page()
    asked(page, "hello sun")
    page.locator(".assistant").get_by_role("button", name="Retry").click()
    expect(versions(page, ".assistant")).to_have_text("‹2 / 2›")
    expect(page.locator("#send")).to_have_text("Send")
    page.click("#open-settings")
    with page.expect_download() as download:
        page.click("#export-all")
    text = Path(download.value.path()).read_text()
    (tmp_path / "chats.json").write_text(text)
    page.set_input_files("#import-input", tmp_path / "chats.json")
    expect(page.locator("#chats button")).to_have_count(1)  # it is here already
    other = open_page()
    other.click("#open-settings")
    for message in DAMAGED:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **message}]
        (tmp_path / "bad.json").write_text(json.dumps([{"messages": messages[:1]}, {"messages": messages}]))
        other.set_input_files("#import-input", tmp_path / "bad.json")
        expect(other.locator("#ask-title")).to_contain_text("No chats found")
        other.click("#ask-ok")
        expect(other.locator("#import-input")).to_have_value("")
    assert other.evaluate(STORED_CHATS) == []
    (tmp_path / "cli.json").write_text(json.dumps({"messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]}))
    other.set_input_files("#import-input", [tmp_path / "chats.json", tmp_path / "cli.json"])
    expect(other.locator("#chats button")).to_have_count(2)
    other.locator("#chats").get_by_role("button", name="hello sun").click()
    expect(versions(other, ".assistant")).to_have_text("‹2 / 2›")
    reload(other)
    other.locator("#chats").get_by_role("button", name="Hi").click()
    expect(other.locator(".assistant .markdown")).to_have_text("Yes.")
    expect(other.locator(".thoughts div")).to_have_text("Hm.")


def test_a_stored_chat_that_is_damaged(open_page):
    """Of another version of the page, say: it is left out, and the others are there."""
    page = open_page()
    asked(page, "hello moon")
    page.evaluate("""new Promise((resolve) => {
        indexedDB.open("tandem").onsuccess = ({ target: { result: db } }) => {
            const chats = db.transaction("chats", "readwrite").objectStore("chats");
            const messages = [{ role: "assistant", content: "y", reasoning: 1, fork: { at: 9 } }];
            chats.put({ id: "a" }).onsuccess = () => chats.put({ id: "b", updated: 1e15, messages }).onsuccess = () => {
                db.close();
                resolve();
            };
        };
    })""")
    reload(page)
    expect(page.locator("#chats button")).to_have_text(["hello moon"])
    asked(page, "hello again")


def test_what_cannot_be_sent_stays(open_page):
    page = open_page()
    asked(page, "hello")
    text = "hello " + "x" * 5000
    ask(page, text)
    expect(page.locator("#reason")).to_contain_text("5")
    expect(page.locator("#reason")).to_contain_text("context")
    expect(page.locator("#input")).to_have_value(text)
    expect(page.locator(".message")).to_have_count(2)
    shoot(page, "too-long")
    check_accessible(page)
    assert "Good morning" in asked(page, "hello").inner_text()
    expect(page.locator("#reason")).to_be_hidden()


def test_an_error_amid_an_answer_keeps_what_came(open_page, gate):
    page = open_page()
    ask(page, "slow")
    gate.say("The beginning", {"error": {"message": "the worker died"}}, None)
    expect(page.locator(".assistant .error")).to_have_text("the worker died")
    expect(page.locator(".assistant .markdown")).to_have_text("The beginning")
    shoot(page, "error")
    check_accessible(page)


def test_rename_export_delete(open_page):
    page = open_page()
    asked(page, "ponder this, although it has a very long first line that does not fit")
    assert page.locator("#sidebar").bounding_box()["width"] == 272
    page.click("#more summary")
    page.click("#rename")
    page.fill("#ask-input", "A question")
    page.keyboard.press("Enter")
    expect(page.locator("#chats button")).to_have_text("A question")

    def exported(button):
        page.click("#more summary")
        with page.expect_download() as download:
            page.click(button)
        return download.value.suggested_filename, Path(download.value.path()).read_text()

    name, text = exported("#export-markdown")
    assert name == "A-question.md" and text.startswith("# A question\n\n## You\n\nponder this, although")
    assert "I should think." in text and text.endswith("Yes indeed.\n")
    name, text = exported("#export-json")
    assert name == "A-question.json"
    assert [m["role"] for m in json.loads(text)[0]["messages"]] == ["user", "assistant"]
    page.click("#open-settings")
    with page.expect_download() as download:
        page.click("#export-all")
    assert [c["title"] for c in json.loads(Path(download.value.path()).read_text())] == ["A question"]
    page.get_by_role("button", name="Cancel").click()
    page.click("#more summary")
    page.click("#delete")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#chats button")).to_have_count(1)
    page.click("#more summary")
    page.click("#delete")
    shoot(page, "delete")
    page.click("#ask-ok")
    expect(page.locator("#chats button")).to_have_count(0)
    reload(page)
    expect(page.locator("#model")).to_have_text("scripted")
    expect(page.locator("#chats button")).to_have_count(0)


def test_settings_are_sent_and_kept(open_page, gate):
    page = open_page()
    page.click("#open-settings")
    shoot(page, "settings")
    check_accessible(page)
    page.fill("#set-system", "Be brief.")
    page.fill("#set-temperature", "0.5")
    page.fill("#set-top-p", "0.9")
    page.fill("#set-max-tokens", "3")
    page.select_option("#set-thinking", "off")
    page.select_option("#set-effort", "low")
    page.get_by_role("button", name="Save").click()
    page.wait_for_function("localStorage.getItem('tandem.settings')?.includes('Be brief.')")
    reload(page)
    expect(page.locator("#model")).to_have_text("scripted")
    answer = asked(page, "hello")
    expect(answer.locator(".note")).to_contain_text("3 tokens")
    expect(answer.locator(".note")).to_contain_text("cut at the limit")
    sent = gate.asked[-1]
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.5, 0.9, 3)
    assert sent["reasoning_effort"] == "low" and sent["chat_template_kwargs"] == {"enable_thinking": False}
    page.click("#open-settings")
    page.check("#set-only")
    page.fill("#set-system", "Be long.")
    page.fill("#set-max-tokens", "")
    page.get_by_role("button", name="Save").click()
    page.wait_for_function(STORED_CHATS + ".then((chats) => chats.some(({ settings }) => settings))")
    reload(page)
    asked(page, "hello again")
    assert gate.asked[-1]["messages"][0]["content"] == "Be long." and "max_tokens" not in gate.asked[-1]
    page.click("#new-chat")
    asked(page, "hello")
    assert gate.asked[-1]["messages"][0]["content"] == "Be brief."
    page.locator("#chats button").nth(1).click()
    page.click("#open-settings")
    expect(page.locator("#set-system")).to_have_value("Be long.")
    page.uncheck("#set-only")
    expect(page.locator("#set-system")).to_have_value("Be brief.")
    page.get_by_role("button", name="Save").click()
    asked(page, "hello")
    assert gate.asked[-1]["messages"][0]["content"] == "Be brief."


def test_more_settings_presets_and_colours(open_page, gate):
    page = open_page()
    page.click("#open-settings")
    page.click(".extra summary")
    for name, value in {"top-k": "7", "min-p": "0.1", "seed": "3", "stop": "one\ntwo", "schema": "{"}.items():
        page.fill(f"#set-{name}", value)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#settings")).to_be_visible()  # this is not JSON
    page.fill("#set-schema", '{"type": "boolean"}')
    check_accessible(page)
    page.click("#keep-preset")
    page.fill("#ask-input", "strict")
    page.click("#ask-ok")
    expect(page.locator("#preset")).to_have_value("strict")
    page.select_option("#set-theme", "dark")
    page.get_by_role("button", name="Save").click()
    page.wait_for_function("getComputedStyle(document.documentElement).colorScheme == 'dark'")
    check_accessible(page)
    shoot(page, "dark")
    ask(page, "hello")
    expect(page.locator("#send")).to_have_text("Send")
    body = gate.asked[-1]
    assert (body["top_k"], body["min_p"], body["seed"], body["stop"]) == (7, 0.1, 3, ["one", "two"])
    assert body["response_format"]["json_schema"]["schema"] == {"type": "boolean"}
    reload(page)
    page.wait_for_function("getComputedStyle(document.documentElement).colorScheme == 'dark'")
    page.click("#open-settings")
    page.fill("#set-top-k", "")
    page.select_option("#preset", "strict")
    expect(page.locator("#set-top-k")).to_have_value("7")
    page.click("#drop-preset")
    expect(page.locator("#preset option")).to_have_text(["none"])


def test_a_title_of_the_models_own_and_keys(open_page, gate):
    page = open_page()
    asked(page, "hello")
    page.click("#more summary")
    gate.title = '"A morning greeting."'
    page.click("#suggest-title")
    expect(page.locator("#title")).to_have_text("A morning greeting")
    asked(page, "ponder")
    assert len(gate.asked[-1]["messages"]) == 3  # what asked for the title is no part of it
    page.keyboard.press("Control+Shift+K")
    expect(page.locator("#title")).to_have_text("New chat")
    asked(page, "hello")
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()


def test_loading_is_shown(open_page, gate):
    gate.health = (503, {"status": "loading", "models": [{"id": "scripted", "status": "loading"}]})
    page = open_page()
    expect(page.locator("#server")).to_have_text("The model is loading…")
    gate.health = None
    expect(page.locator("#server")).to_be_hidden()


def test_one_of_several_models(open_page, gate):
    gate.models = [{"id": "org/other", "max_model_len": 4096, "size": 3 << 30, "status": "sleeping"},
                   {"id": "scripted", "max_model_len": 4096, "size": 1 << 29, "status": "ok"}]
    page = open_page("org/other")
    options = ["org/other · 3.0 GiB · not loaded", "scripted · 0.5 GiB · loaded"]
    assert page.locator("#picker option").all_text_contents() == options
    ask(page, "hello")  # the server has no such model
    expect(page.locator("#reason")).to_contain_text("other")
    page.select_option("#picker", "scripted")
    expect(page.locator("#model")).to_have_text("scripted")
    check_accessible(page)
    shoot(page, "models")
    page.click("#send")
    expect(page.locator(".assistant .markdown")).to_have_text("Good morning to you.")
    expect(page.locator(".assistant .note").first).to_contain_text("scripted · ")
    gate.health = (200, {"status": "ok", "models": [{"id": "org/other", "status": "loading"}]})
    reload(page)
    expect(page.locator("#picker option").first).to_have_text("org/other · 3.0 GiB · loading")
    assert page.locator("#picker").input_value() == "scripted"


def test_a_key_is_asked_for(open_page, gate):
    gate.key = "secret"
    page = open_page(re.compile("API key"))
    expect(page.locator("#set-key")).to_be_focused()
    page.fill("#set-key", "secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("scripted")
    assert page.evaluate("localStorage.getItem('tandem.key')") is None
    page.click("#open-settings")
    page.check("#set-keep")
    page.get_by_role("button", name="Save").click()
    second = page.context.new_page()
    second.goto(page.url)
    expect(second.locator("#model")).to_have_text("scripted")


def test_a_late_refusal_asks_for_no_key(open_page, gate):
    gate.key = "secret"
    page = open_page(re.compile("API key"))
    gate.refuse_now.clear()
    assert gate.is_asked.wait(60)  # the page asks from time to time
    page.fill("#set-key", "secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("scripted")
    with page.expect_response(lambda response: response.status == 401):
        gate.refuse_now.set()
    assert "Good morning" in asked(page, "hello").inner_text()
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#model")).to_have_text("scripted")


def test_a_full_store_is_said(open_page):
    page = open_page()
    page.evaluate("""() => { IDBObjectStore.prototype.put = () => {
        throw new DOMException("full", "QuotaExceededError"); }; }""")
    assert "Good morning" in asked(page, "hello").inner_text()
    expect(page.locator("#storage")).to_contain_text("storage is full")


def test_a_phone(open_page):
    page = open_page(viewport={"width": 390, "height": 780}, has_touch=True, is_mobile=True)
    page.fill("#input", "sort")
    page.press("#input", "Enter")  # there is no Shift
    page.keyboard.type("a list")
    expect(page.locator("#input")).to_have_value("sort\na list")
    page.click("#send")
    expect(page.locator(".assistant .note")).to_contain_text("tokens/s")
    expect(page.locator("#send")).to_have_text("Send")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    shoot(page, "phone")
    check_accessible(page)
    expect(page.locator("#new-chat")).to_be_hidden()
    page.click("#new-chat-top")
    expect(page.locator(".message")).to_have_count(0)
    page.click("#menu")
    expect(page.locator("#new-chat")).to_be_focused()
    shoot(page, "phone-chats")
    check_accessible(page)
    page.keyboard.press("Escape")
    expect(page.locator("#new-chat")).to_be_hidden()
