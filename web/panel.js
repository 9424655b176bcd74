// The tab: its sections, and what its buttons do.

import { app } from '../../scripts/app.js'
import { makeCard } from './card.js'
import { el, setText } from './dom.js'
import { makeFindings, makeRunning, makeRuns } from './renders.js'
import { ask, follow, refresh, state } from './state.js'
import { t } from './strings.js'

let sections = 0

function section(title, ...children) {
  const id = `monarch-section-${++sections}`
  return el('section', { 'aria-labelledby': id }, el('h3', { id }, title), ...children)
}

/** Shows the tab in `container`; returns what takes it away again. */
export function showPanel(container) {
  const status = el('p', { class: 'monarch-status', role: 'status' })
  const away = el('p', { class: 'monarch-status monarch-failed', role: 'status' }, t('away'))

  const busy = new Set()

  /** Does something, and says how it went; not again before that is done. */
  async function act(button, action) {
    if (busy.has(button)) return
    busy.add(button)
    button.disabled = true
    try {
      setText(status, await action())
      status.classList.remove('monarch-failed')
    } catch (error) {
      setText(status, t('failed', { error: error.message }))
      status.classList.add('monarch-failed')
    } finally {
      busy.delete(button)
      button.disabled = false
      enable()
    }
  }

  function enable() {
    check.disabled = busy.has(check) || state.doctor.running || state.run !== null
    free.disabled = busy.has(free) || state.run !== null
  }

  const check = el('button', { type: 'button', class: 'monarch-button', click: () => act(check, startCheck) }, t('check.button'))
  const free = el('button', { type: 'button', class: 'monarch-button', click: () => act(free, freeMemory) }, t('free.button'))
  const machines = makeMachines((node) => act(machines.element, () => forget(node)))
  const [running, runs, findings] = [makeRunning(), makeRuns(), makeFindings()]
  const render = section(t('running'), running.element)
  const doctor = section(t('doctor'), findings.element)
  const panel = el(
    'div',
    { class: 'monarch-panel' },
    el('header', { class: 'monarch-head' }, el('h2', {}, t('tab')), el('div', { class: 'monarch-buttons' }, check, free)),
    away,
    status,
    render,
    section(t('machines'), machines.element, makePairing(act)),
    doctor,
    section(t('last'), runs.element)
  )
  let wasChecking = false
  doctor.hidden = true
  container.replaceChildren(panel)

  return follow(() => {
    machines.update(state.nodes)
    render.hidden = state.run === null
    if (state.run !== null) running.update(state.run)
    runs.update(state.runs)
    findings.update(state.doctor)
    doctor.hidden = !state.doctor.running && !state.doctor.problem && !state.doctor.checks.length
    // Also when it is done: there is more to see then.
    if (state.doctor.running !== wasChecking) doctor.scrollIntoView({ block: state.doctor.running ? 'nearest' : 'start' })
    wasChecking = state.doctor.running
    away.hidden = !state.away
    enable()
  })
}

async function startCheck() {
  await ask('check')
  await refresh()
  return ''
}

async function freeMemory() {
  await ask('free')
  return t('free.done')
}

async function forget(node) {
  const agreed = await app.extensionManager.dialog.confirm({
    title: t('forget.button'),
    message: t('forget.question', { name: node.name })
  })
  if (!agreed) return ''
  await ask('forget', { name: node.paired })
  return t('forget.done', { name: node.name })
}

function makeMachines(forgetNode) {
  const cards = new Map()
  const list = el('ul', { class: 'monarch-list' })
  const none = el('p', { class: 'monarch-hint' }, t('noWorkers'))
  const element = el('div', {}, list, none)

  function update(nodes) {
    const ids = nodes.map((node) => node.id)
    for (const [id, card] of cards) {
      if (!ids.includes(id)) {
        card.element.remove()
        cards.delete(id)
      }
    }
    for (const [index, node] of nodes.entries()) {
      if (!cards.has(node.id)) cards.set(node.id, makeCard(node.id, index === 0, forgetNode))
      const card = cards.get(node.id)
      card.update(node)
      if (list.children[index] !== card.element) list.insertBefore(card.element, list.children[index] ?? null)
    }
    none.hidden = nodes.length !== 1
  }
  return { element, update }
}

function makePairing(act) {
  const id = 'monarch-pairing-code'
  const input = el('input', {
    id,
    class: 'monarch-input',
    placeholder: t('pair.placeholder'),
    autocomplete: 'off',
    spellcheck: 'false',
    required: true
  })
  const button = el('button', { class: 'monarch-button' }, t('pair.button'))

  async function pair() {
    const { name } = await ask('pair', { code: input.value })
    input.value = ''
    return t('pair.done', { name })
  }
  function submit(event) {
    event.preventDefault()
    act(button, pair)
  }
  return el(
    'form',
    { class: 'monarch-pairing', submit },
    el('label', { for: id }, t('pair.label')),
    el('div', { class: 'monarch-row' }, input, button)
  )
}
