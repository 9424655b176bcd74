"""ComfyUI's page as a person uses it: templates, Run, Monarch's tab, messages; by roles and labels."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOAD_MS = 90_000


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    """Raises AssertionError if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def code_of(worker: Any) -> str:
    """The pairing code that a worker printed last."""
    return re.findall(r"monarch1-\S+", worker.output)[-1]


class ComfyPage:
    """One page. `errors`: uncaught errors in it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(url)
        self.tab_button.wait_for(timeout=_LOAD_MS)

    @property
    def tab_button(self) -> Any:
        return self.page.get_by_role("button", name="Monarch", exact=True)

    @property
    def panel(self) -> Any:
        return self.page.locator(".monarch-panel")

    def open_tab(self) -> None:
        self.tab_button.click()
        self.panel.wait_for(timeout=10_000)

    def region(self, name: str) -> Any:
        """A section of the tab."""
        return self.panel.get_by_role("region", name=name, exact=True)

    def card(self, name: str) -> Any:
        """The card of a machine; `name` is part of its text."""
        return self.region("Machines").get_by_role("listitem").filter(has_text=name)

    def wait_until(self, name: str, state: str, seconds: float) -> None:
        """Until the card of a machine says that it is in this state."""
        self.card(name).get_by_text(state, exact=True).wait_for(timeout=1000 * seconds)

    def button(self, name: str) -> Any:
        return self.panel.get_by_role("button", name=name, exact=True)

    def open_template(self, pack: str, title: str) -> None:
        """Choose a template of a pack in the template browser."""
        self.page.evaluate("() => { for (const node of window.app.graph._nodes) node.ofTheGraphBefore = true }")
        self.page.evaluate("() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates')")
        self.page.get_by_text(pack, exact=True).click()
        self.page.get_by_text(title, exact=True).first.click()
        wait_for(lambda: self.page.evaluate(_HAS_NEW_GRAPH), 20)

    def open_graph(self, graph: dict[str, Any]) -> None:
        """Load a graph in UI format."""
        self.page.evaluate("graph => window.app.loadGraphData(graph)", graph)

    def run(self) -> None:
        self.page.get_by_test_id("queue-button").click()

    def pair(self, code: str) -> None:
        self.panel.get_by_label("Pairing code").fill(code)
        self.button("Pair").click()

    def toasts(self) -> list[str]:
        """Texts of the messages that are shown."""
        # The marks that the front ends give one: first the pinned one's, then the newest one's.
        return self.page.locator(".p-toast-message, [data-testid=toast]").all_inner_texts()

    def has_toast(self, *parts: str) -> bool:
        return any(all(part in text for part in parts) for text in self.toasts())

    def choose(self, setting: str, value: Any) -> None:
        """Set one of ComfyUI's settings, as its dialog does."""
        self.page.evaluate("([id, value]) => window.app.extensionManager.setting.set(id, value)", [setting, value])

    def use_theme(self, name: str) -> None:
        self.choose("Comfy.ColorPalette", name)
        self.page.wait_for_timeout(300)

    def clipped(self) -> list[str]:
        """Texts in the tab that do not fit where they are, or that lie over one another."""
        return self.page.evaluate(_CLIPPED)

    def contrasts(self) -> dict[str, float]:
        """Each text of the tab with its contrast to what is behind it, as WCAG defines that."""
        return self.page.evaluate(_CONTRASTS)

    def focused(self) -> str:
        """What a screen reader says of the element that has the focus."""
        return self.page.evaluate(
            "() => { const at = document.activeElement;"
            " return at.getAttribute('aria-label') ?? at.labels?.[0]?.textContent ?? at.textContent }"
        ) or self.page.evaluate("() => document.activeElement.textContent")

    def show_node(self, kind: str, scale: float = 1.0) -> dict[str, float]:
        """Bring the first node of a kind into view beside the tab; where in the page it is then."""
        self.choose("LiteGraph.Canvas.MinFontSizeForLOD", 0)
        place = self.page.evaluate(_SHOW_NODE, [kind, scale])
        self.page.wait_for_timeout(500)
        return place

    def set_widget(self, kind: str, name: str, value: Any) -> None:
        """Give a widget of the first node of a kind another value."""
        self.page.evaluate(
            "([kind, name, value]) => { window.app.graph._nodes.find((node) => node.type === kind)"
            ".widgets.find((widget) => widget.name === name).value = value }",
            [kind, name, value],
        )

    def screenshot(self, name: str, clip: dict[str, float] | None = None) -> None:
        folder = os.environ.get("MONARCH_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png", clip=clip)


_HAS_NEW_GRAPH = """() => {
  const nodes = window.app.graph?._nodes ?? []
  return nodes.length > 0 && !nodes.some((node) => node.ofTheGraphBefore)
}"""

_SHOW_NODE = """([kind, scale]) => {
  const canvas = window.app.canvas
  const node = window.app.graph._nodes.find((each) => each.type === kind)
  const [left, top, title, margin] = [480, 110, 30, 20]
  canvas.ds.scale = scale
  canvas.ds.offset = [left / scale - node.pos[0], (top + margin) / scale + title - node.pos[1]]
  canvas.setDirty(true, true)
  const corner = canvas.canvas.getBoundingClientRect()
  return {
    x: corner.left + left - margin,
    y: corner.top + top,
    width: node.size[0] * scale + 2 * margin,
    height: (node.size[1] + title) * scale + 2 * margin
  }
}"""

_CLIPPED = """() => {
  const found = []
  const panel = document.querySelector('.monarch-panel')
  const right = panel.getBoundingClientRect().right
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
  const texts = [...panel.querySelectorAll('*')].filter((element) => element.checkVisibility() && hasText(element))
  const boxes = texts.map((element) => [element, element.getBoundingClientRect()])
  for (const [element, box] of boxes) {
    if (element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== 'inline') {
      found.push(`clipped: ${element.textContent}`)
    }
    if (box.right > right + 1) found.push(`outside: ${element.textContent}`)
  }
  for (const [one, a] of boxes) {
    for (const [other, b] of boxes) {
      const apart = a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1
      if (one !== other && !one.contains(other) && !other.contains(one) && !apart) {
        found.push(`over one another: ${one.textContent} / ${other.textContent}`)
      }
    }
  }
  return found
}"""

_CONTRASTS = """() => {
  const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 })
  const pen = canvas.getContext('2d', { willReadFrequently: true })
  const rgba = (color) => {
    pen.clearRect(0, 0, 1, 1)
    pen.fillStyle = color
    pen.fillRect(0, 0, 1, 1)
    return [...pen.getImageData(0, 0, 1, 1).data]
  }
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((value) => {
      const part = value / 255
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4
    })
    return 0.2126 * x + 0.7152 * y + 0.0722 * z
  }
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor)
      if (color[3] === 255) return color
    }
    return [255, 255, 255, 255]
  }
  const found = {}
  for (const element of document.querySelectorAll('.monarch-panel *')) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim())
    if (!element.checkVisibility() || !text.length) continue
    const [one, other] = [rgba(getComputedStyle(element).color), behind(element)].map(luminance)
    found[element.textContent] = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)
  }
  return found
}"""
