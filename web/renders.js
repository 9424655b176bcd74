// The running render, and the last ones.

import { el, setText, terms } from './dom.js'
import { percent, short } from './numbers.js'
import { t } from './strings.js'

function shares(run) {
  const given = Object.entries(run.shares)
  if (!given.length) return undefined
  return given.map(([node, part]) => `${node === 'this machine' ? t('thisMachine') : node} ${percent(part)}`).join(', ')
}

function seconds(value, key = 'run.seconds') {
  return value === null ? undefined : t(key, { seconds: short(Math.round(1000 * value) / 1000) })
}

function speedup(run) {
  return run.speedup === null ? undefined : `${run.speedup.toFixed(2)}x`
}

function speedupBesidePrediction(run) {
  const measured = speedup(run)
  if (!measured || !run.predicted) return measured
  return t('run.predicted', { speedup: measured, predicted: `${run.predicted.toFixed(2)}x` })
}

/** {element, update(run)} */
export function makeRunning() {
  const done = el('div')
  const progress = el('div', { class: 'monarch-bar', role: 'progressbar', 'aria-label': t('running'), 'aria-valuemin': 0 }, done)
  const lines = terms({
    step: t('run.step'),
    split: t('run.split'),
    shares: t('run.shares'),
    pace: t('run.pace'),
    waiting: t('run.waiting'),
    speedup: t('run.speedup')
  })
  const element = el('div', {}, progress, lines.element)

  function update(run) {
    progress.setAttribute('aria-valuemax', run.steps)
    progress.setAttribute('aria-valuenow', run.step)
    done.style.width = percent(run.step / (run.steps || 1)).replace(' ', '')
    lines.set({
      step: t('run.stepOf', run),
      split: run.split ? t(`run.${run.split}`) : t('run.alone'),
      shares: shares(run),
      pace: seconds(run.seconds_per_step),
      waiting: run.split ? seconds(run.waiting) : undefined,
      speedup: speedupBesidePrediction(run)
    })
  }
  return { element, update }
}

/** The time of day of a moment in seconds since 1970. */
function clock(at) {
  return new Date(1000 * at).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' })
}

function makeRun(run) {
  const how = run.split ? [t(`run.${run.split}`), speedup(run)] : [t('run.oneMachine')]
  const facts = [...how, seconds(run.seconds_per_step, 'run.perStep')]
  return el(
    'li',
    { class: 'monarch-run', 'data-split': run.split ?? 'none' },
    el('div', { class: 'monarch-head' }, el('strong', {}, facts.filter(Boolean).join(', ')), el('time', {}, clock(run.at))),
    el('p', { class: 'monarch-detail' }, run.line)
  )
}

/** {element, update(runs)} */
export function makeRuns() {
  const nothing = el('p', { class: 'monarch-hint' }, t('noRuns'))
  const list = el('ol', { class: 'monarch-list' })
  const element = el('div', {}, nothing, list)
  let shown = ''

  function update(runs) {
    nothing.hidden = runs.length > 0
    const key = JSON.stringify(runs.map((run) => run.at))
    if (key === shown) return
    shown = key
    list.replaceChildren(...runs.map(makeRun))
  }
  return { element, update }
}

/** {element, update(doctor)}: what the doctor found, each with what to do about it. */
export function makeFindings() {
  const summary = el('p', { class: 'monarch-hint', role: 'status' })
  const list = el('ul', { class: 'monarch-list' })
  const when = el('time')
  const element = el('div', {}, el('div', { class: 'monarch-head' }, summary, when), list)
  let shown = ''

  function update({ running, problem, checks, at }) {
    const ready = checks.every((check) => check.ok)
    const verdict = checks.length ? t(ready ? 'check.ready' : 'check.notReady') : ''
    setText(summary, running ? t('check.running') : problem || verdict)
    setText(when, running || at === null ? '' : clock(at))
    // Only what is new: a text that is being selected to be copied would be gone.
    const key = JSON.stringify(checks)
    if (key === shown) return
    shown = key
    list.replaceChildren(...checks.map(makeFinding))
  }
  return { element, update }
}

function makeFinding(check) {
  const fix = check.fix ? [el('p', { class: 'monarch-fix' }, t('check.fix', check))] : []
  return el(
    'li',
    { class: 'monarch-finding', 'data-status': check.status },
    el('div', { class: 'monarch-head' }, el('strong', {}, check.name), el('span', { class: 'monarch-state' }, t(`check.${check.status}`))),
    el('p', { class: 'monarch-detail' }, check.detail),
    ...fix
  )
}
