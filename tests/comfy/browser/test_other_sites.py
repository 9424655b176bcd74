"""Pages of other sites, open in the same browser, can neither use Monarch's routes nor read their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from monarch_split.tests.comfy.browser.page import code_of, wait_for

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(180)]

# What a page can try: requests that need no permission, ones that do, and a form. Answers what came of each.
_TRY = """async ([url, code]) => {
  const outcomes = {}
  const attend = { client: 'x', open: true }
  const bodies = { pair: { code }, forget: { name: 'second' }, check: {}, free: {}, attend }
  for (const [route, body] of Object.entries(bodies)) {
    for (const prefix of ['/monarch/', '/api/monarch/']) {
      for (const type of ['text/plain', 'application/json']) {
        for (const mode of ['no-cors', 'cors']) {
          const request = { method: 'POST', mode, headers: { 'Content-Type': type }, body: JSON.stringify(body) }
          outcomes[`${prefix}${route} ${type} ${mode}`] = await fetch(url + prefix + route, request).then(
            (answer) => answer.type === 'opaque' ? 'opaque' : `read ${answer.status}`,
            () => 'refused'
          )
        }
      }
    }
  }
  outcomes.state = await fetch(`${url}/monarch/state`).then((answer) => answer.text(), () => 'refused')
  return outcomes
}"""
_FORM = """([url, code]) => {
  const form = document.createElement('form')
  Object.assign(form, { method: 'post', action: `${url}/monarch/pair`, enctype: 'text/plain' })
  const input = document.createElement('input')
  // As JSON: {"code": "…", "x": "="}
  Object.assign(input, { name: `{"code": "${code}", "x": "`, value: '"}' })
  form.append(input)
  document.body.append(form)
  form.submit()
}"""


@pytest.fixture(scope="module")
def other_site() -> Iterator[int]:
    """The port of another web server on this machine."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>another site</title><body>another site</body>")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


# Another port is another origin of the same site, another name another site.
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_page_of_another_origin_has_no_effect_and_reads_nothing(
    site: Any, browser: Any, other_site: int, host: str, open_page: Callable[..., Any],
    pairable_worker: Callable[..., Any],
) -> None:  # fmt: skip
    pairings = site.configuration / "pairings.json"
    with pairable_worker() as worker:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://{host}:{other_site}")
        outcomes = page.evaluate(_TRY, [site.url, code_of(worker)])
        assert set(outcomes.values()) <= {"refused", "opaque"}, outcomes
        page.evaluate(_FORM, [site.url, code_of(worker)])
        page.wait_for_load_state()
        context.close()
        assert "Paired with" not in worker.output
        assert not pairings.exists() or "second" not in pairings.read_text()

        # What was tried is possible, from ComfyUI's own page.
        own = open_page()
        own.open_tab()
        own.pair(code_of(worker))
        wait_for(lambda: "Paired with" in worker.output, 20)
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://{host}:{other_site}")
        page.evaluate(_TRY, [site.url, ""])
        context.close()
        assert "second" in pairings.read_text()
        own.panel.get_by_role("button", name="Forget the worker second").click()
        own.page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
        wait_for(lambda: "second" not in pairings.read_text(), 10)
