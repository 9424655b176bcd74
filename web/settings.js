// Monarch's part of ComfyUI's settings dialog. ComfyUI keeps the values in the user's settings file, where the server
// reads them for every render (browser/settings.py).

import { state } from './state.js'
import { textAt } from './strings.js'

function setting(id, details) {
  const key = id.replaceAll('.', '_')
  const [name, tooltip] = ['name', 'tooltip'].map((part) => textAt('settings', key, part))
  return { id, name, tooltip, category: ['Monarch', 'Monarch', name], ...details }
}

// The English text is the key of an option's translation. The value cannot be empty: the dialog would show nothing.
const FROM_FILE = { text: 'monarch.toml', value: 'monarch.toml' }

function clusters(chosen) {
  const names = new Set([...state.clusters, ...(chosen ? [chosen] : [])])
  names.delete(FROM_FILE.value)
  return [FROM_FILE, ...[...names].map((name) => ({ text: name, value: name }))]
}

export const settings = [
  setting('Monarch.Messages', { type: 'boolean', defaultValue: true, sortOrder: 1 }),
  setting('Monarch.WhenNotSplit', {
    type: 'combo',
    options: [
      { text: 'Run it here', value: 'run' },
      { text: 'Stop it', value: 'stop' }
    ],
    defaultValue: 'run',
    sortOrder: 2
  }),
  setting('Monarch.Cluster', { type: 'combo', options: clusters, defaultValue: FROM_FILE.value, sortOrder: 3 })
]
