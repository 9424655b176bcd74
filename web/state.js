// What the server says of the machines and renders, and what can be asked of it. The server sends every change.

import { api } from '../../scripts/api.js'
import { t } from './strings.js'

const NOTHING_FOUND = { running: false, problem: '', checks: [], at: null }
const EMPTY = { nodes: [], run: null, runs: [], doctor: NOTHING_FOUND, clusters: [], away: false }
const listeners = new Set()
let isOpen = false

export let state = EMPTY

function take(news) {
  state = { ...EMPTY, ...news }
  for (const listener of listeners) listener(state)
}

/** Calls `listener` now and after every change; returns what ends that. */
export function follow(listener) {
  listeners.add(listener)
  listener(state)
  return () => listeners.delete(listener)
}

export async function refresh() {
  const answer = await api.fetchApi('/monarch/state')
  if (answer.ok) take(await answer.json())
}

/** Asks the server to do something ("pair", "forget", "check", "free"). Throws an Error with its sentence. */
export async function ask(what, body = {}) {
  let answer
  try {
    answer = await api.fetchApi(`/monarch/${what}`, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify(body)
    })
  } catch {
    throw new Error(t('noAnswer'))
  }
  const result = await answer.json().catch(() => ({ error: t('noAnswer') }))
  if (!answer.ok) throw new Error(result.error ?? answer.statusText)
  return result
}

/** Tells the server whose page this is, and whether it shows the tab: only then are the workers watched. */
export async function attend(open = isOpen) {
  isOpen = open
  const client = api.clientId ?? sessionStorage.getItem('clientId')
  if (!client) return
  await ask('attend', { client, open })
  if (open) await refresh()
}

/** The server is gone, and with it whatever ran there. */
function lose() {
  const nodes = state.nodes.map((node) => ({ ...node, state: 'seeking', detail: '' }))
  const doctor = state.doctor.running ? NOTHING_FOUND : state.doctor
  take({ ...state, nodes, doctor, run: null, away: true })
}

export function listen() {
  const quietly = () => attend().catch(() => {})
  api.addEventListener('monarch.state', (event) => take(event.detail))
  api.addEventListener('status', quietly, { once: true })
  api.addEventListener('reconnecting', lose)
  api.addEventListener('reconnected', () => quietly().then(refresh).catch(() => {}))
  refresh().catch(() => {})
}
