"""Every template of the pack opens in ComfyUI's page, with all its nodes and widgets, and is queued as it stands.

test_example_workflows runs the same prompts to their end.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.comfyui, pytest.mark.timeout(180)]

TEMPLATES = sorted((Path(__file__).parents[3] / "example_workflows").glob("*.json"))

# What the page sends when Run is clicked, without the titles that it adds.
_PROMPT = """async (graph) => {
  await window.app.loadGraphData(structuredClone(graph))
  const { output } = await window.app.graphToPrompt()
  for (const node of Object.values(output)) delete node._meta
  return output
}"""
# Nodes that the page does not know, and widgets whose value is not the one of the file.
_WRONG = """async (graph) => {
  await window.app.loadGraphData(structuredClone(graph))
  const known = window.LiteGraph.registered_node_types
  const wrong = []
  for (const saved of graph.nodes) {
    const node = window.app.graph.getNodeById(saved.id)
    if (!known[saved.type] || !node) wrong.push(`${saved.type} is not known`)
    if (!node || !Array.isArray(saved.widgets_values)) continue
    const shown = (node.widgets ?? []).filter((widget) => widget.serialize !== false).map((widget) => widget.value)
    for (const [index, value] of saved.widgets_values.entries()) {
      if (JSON.stringify(shown[index]) !== JSON.stringify(value)) {
        wrong.push(`${saved.type} shows ${JSON.stringify(shown[index])} for ${JSON.stringify(value)}`)
      }
    }
  }
  return wrong
}"""


def test_templates_have_no_missing_node_and_no_shifted_widget(site: Any, open_page: Callable[..., Any]) -> None:
    assert TEMPLATES
    page = open_page()
    wrong = {path.stem: page.page.evaluate(_WRONG, json.loads(path.read_text(encoding="utf-8"))) for path in TEMPLATES}
    assert {name: problems for name, problems in wrong.items() if problems} == {}
    assert not page.errors


def test_run_sends_the_prompts_that_are_tested(site: Any, open_page: Callable[..., Any]) -> None:
    from monarch_split.tests.comfy.template_prompts import as_prompt

    page = open_page()
    describe = functools.cache(site.object_info)
    for path in TEMPLATES:
        graph = json.loads(path.read_text(encoding="utf-8"))
        assert page.page.evaluate(_PROMPT, graph) == as_prompt(graph, describe), path.stem


def test_templates_are_listed_in_the_template_browser(site: Any, open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.open_template("monarch-split", TEMPLATES[0].stem)
    names = page.page.evaluate("() => window.app.graph._nodes.map((node) => node.type)")
    assert any(name.startswith("Monarch") for name in names)
    page.screenshot("template")
