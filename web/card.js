// The card of one machine.

import { el, setText, terms } from './dom.js'
import { gigabytes, rate, short } from './numbers.js'
import { t } from './strings.js'

function memory(node) {
  if (!node.memory) return t('field.unknown')
  const [used, total] = node.memory
  return t('field.memoryOf', { used: gigabytes(used), total: gigabytes(total) })
}

function models(node) {
  const names = node.models.map((name) => (name === '?' ? t('field.otherModel') : name))
  return names.join(', ') || t('field.noModel')
}

function link(node, isOwn) {
  if (isOwn) return undefined
  if (node.rate === null) return t('field.unknown')
  return t('field.linkRate', { rate: rate(node.rate), rtt: short(1000 * node.rtt) })
}

/** {element, update(node)}; `forget(node)` is called when the user wants that. */
export function makeCard(id, isOwn, forget) {
  let shown
  const name = el('h4', { class: 'monarch-name' })
  const where = el('span', { class: 'monarch-where' })
  const state = el('span', { class: 'monarch-state', 'aria-live': 'polite' })
  const detail = el('p', { class: 'monarch-detail' })
  const bar = el('div', { class: 'monarch-bar', 'aria-hidden': 'true' }, el('div'))
  const lines = terms({
    gpu: t('field.gpu'),
    memory: t('field.memory'),
    model: t('field.model'),
    link: t('field.link')
  })
  const button = el('button', { type: 'button', class: 'monarch-button', click: () => forget(shown) }, t('forget.button'))
  const head = el('div', { class: 'monarch-head' }, el('div', { class: 'monarch-title' }, name, where), state)
  const element = el('li', { class: 'monarch-card' }, head, detail, lines.element, bar, button)

  function update(node) {
    shown = node
    setText(name, node.name)
    setText(where, isOwn ? t('thisMachine') : node.id === node.name ? '' : node.id)
    setText(state, t(`state.${node.state}`))
    element.dataset.state = node.state
    setText(detail, node.detail)
    detail.hidden = !node.detail
    lines.set({ gpu: node.device || t('field.unknown'), memory: memory(node), model: models(node), link: link(node, isOwn) })
    bar.hidden = !node.memory
    if (node.memory) bar.firstChild.style.width = percentOf(node.memory)
    button.hidden = !node.paired
    button.setAttribute('aria-label', t('forget.label', { name: node.name }))
  }
  return { element, update }
}

function percentOf([used, total]) {
  return `${Math.min(100, (100 * used) / total)}%`
}
