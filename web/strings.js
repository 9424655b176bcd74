// The texts of locales/, in the language that ComfyUI is set to, and in English where that lacks one.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'

const languages = await load()

async function load() {
  try {
    return await (await api.fetchApi('/i18n')).json()
  } catch {
    return {}
  }
}

function find(language, path) {
  return path.reduce((part, key) => part?.[key], languages[language])
}

/** The text at a path such as ("monarch", "tab"); its last part if there is none. */
export function textAt(...path) {
  const language = app.extensionManager?.setting?.get('Comfy.Locale') ?? 'en'
  return find(language, path) ?? find('en', path) ?? path.at(-1)
}

/** The text of `key` under "monarch", such as "run.step", with {name} replaced by values.name. */
export function t(key, values = {}) {
  const text = textAt('monarch', ...key.split('.'))
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole)
}
