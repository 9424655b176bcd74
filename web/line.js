// What a node shows of its last run, below its widgets. ComfyUI's own progress text is gone when the job is done.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { el, setText } from './dom.js'

const NAME = 'monarch_line'
// Of the text, as monarch.css has it, in pixels of the graph; the width is what a character takes at most on average.
const LINE_HEIGHT = 16
const CHARACTER_WIDTH = 6.5
const MARGIN = 40

/** The node with this id in a prompt: "12", or "7:12" within the subgraph of node 7. */
function find(id) {
  const path = String(id).split(':')
  let graph = app.graph?.rootGraph ?? app.graph
  for (const part of path.slice(0, -1)) graph = graph?.getNodeById(part)?.subgraph
  return graph?.getNodeById(path.at(-1))
}

function makeWidget(node) {
  const element = el('div', { class: 'monarch-line', role: 'status' })
  const widget = node.addDOMWidget(NAME, NAME, element, {
    serialize: false,
    getValue: () => element.textContent,
    getMinHeight: () => LINE_HEIGHT * (1 + Math.ceil((element.textContent.length * CHARACTER_WIDTH) / (node.size[0] - MARGIN)))
  })
  // Not in saved graphs either.
  widget.serialize = false
  return widget
}

function widgetOf(node) {
  return node?.widgets?.find((each) => each.name === NAME)
}

function showLine(node, text) {
  const widget = widgetOf(node) ?? makeWidget(node)
  setText(widget.element, text)
  // A height that somebody else chose is kept; what a longer line added is not.
  const [width, height] = node.size
  if (height !== widget.grownTo) widget.ownHeight = height
  const needed = Math.max(node.computeSize()[1], widget.ownHeight)
  if (needed !== height) node.setSize([width, needed])
  widget.grownTo = node.size[1]
  node.setDirtyCanvas(true, true)
}

export function showLines() {
  // What is said of the run before would be taken for this one's, if this one is not split.
  api.addEventListener('executing', ({ detail }) => {
    const widget = detail && widgetOf(find(detail))
    if (widget) setText(widget.element, '')
  })
  api.addEventListener('monarch.run', ({ detail }) => {
    const node = find(detail.node)
    if (node) showLine(node, detail.line)
  })
}
