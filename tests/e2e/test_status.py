"""The page at /status in a browser, and `tandem top` on a terminal."""

import re
import subprocess

import httpx
import pytest
from terminal import Terminal
from test_page import asked, browser, check_accessible, expect, gate, open_page, server, shoot  # fixtures, too

pytestmark = pytest.mark.no_asan


def figure(page, name):
    return page.locator("#figures div", has=page.get_by_text(name, exact=True)).locator("dd")


def cells(page, table):
    return [row.locator("td").all_text_contents() for row in page.locator(f"#{table} tbody tr").all()]


def test_what_the_status_page_shows(open_page, gate):
    page = open_page()
    asked(page, "sort a list")
    page.get_by_role("link", name="Server status").click()
    expect(page.locator("#state")).to_have_text("ok")
    expect(figure(page, "Prompt tokens from the cache")).to_have_text(re.compile(r"\d+ %"))
    assert re.fullmatch(r"[\d.,]+ GiB of [\d.,]+ GiB", figure(page, "Memory in use").inner_text())
    (model,) = cells(page, "models")
    assert model[:5] == ["scripted", "ok", "0", "0", "0 %"] and int(model[5]) > 0 and int(model[6].replace(",", "")) > 100
    assert [row[:3] for row in cells(page, "workers")] == \
        [["prefill", "scripted", "ok"], ["decode", "scripted", "ok"]]
    check_accessible(page)
    chat = page.context.new_page()
    chat.goto(gate.url)
    asked(chat, "sort another list")
    expect(figure(page, "Generating")).to_have_text(re.compile(r"^[1-9][\d.,]* tokens/s$"))
    expect(figure(page, "Time to first token")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    expect(figure(page, "Time per token")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    expect(page.locator("#figures .history")).to_have_count(5)
    assert re.fullmatch(r"\d+ min", figure(page, "Up for").inner_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+", figure(page, "Version").inner_text())
    shoot(page, "status")
    page.set_viewport_size({"width": 390, "height": 780})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    gate.health = (503, {"status": "stuck", "running": 1, "waiting": 2, "workers": [
        {"role": "worker", "status": "stuck", "reason": "silent <b>for</b> 40 s", "running": 1, "threads": 2,
         "restarts": 3}], "models": [{"id": "scripted", "status": "stuck", "running": 1, "waiting": 2}]})
    expect(page.locator("#state")).to_have_text("stuck")
    assert cells(page, "workers") == [["worker", "scripted", "stuck: silent <b>for</b> 40 s", "", "1", "2", "3"]]
    shoot(page, "status-phone")


def test_figures_need_the_key(open_page, gate):
    page = open_page()
    gate.key = "secret"
    page.goto(gate.url + "status")
    expect(page.locator("#problem")).to_have_text(re.compile("API key"))
    expect(page.locator("#state")).to_have_text("ok")
    assert page.locator("#figures div").count() == 0 and len(cells(page, "workers")) == 2


def test_top(tandem_bin, server):
    command = [tandem_bin, "top", "--server", server.url]
    plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "\033" not in plain and re.search(r"^ +0 +0 +0% +ok +scripted$", plain, re.M)
    assert "waiting 0" in plain and re.search(r"in use [\d.]+ of [\d.]+ GiB", plain)
    screen = Terminal(*command)
    screen.wait_for(b"scripted")
    httpx.post(server.url + "/v1/chat/completions", timeout=60, trust_env=False,
               json={"messages": [{"role": "user", "content": "sort"}]})
    assert b"\033[H\033[J" in screen.wait_for(b"per token")
    screen.send(b"\x03")
    assert screen.end() == 0
    refused = subprocess.run([*command, "--server", "http://127.0.0.1:1"], capture_output=True, text=True)
    assert refused.returncode == 1 and "127.0.0.1:1" in refused.stderr
