// Toasts. The server sends each message once, and none if the user does not want any.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'
import { t } from './strings.js'

const LIFE_MS = 12000

function toast(severity, summary, detail) {
  app.extensionManager.toast.add({ severity, summary, detail, life: LIFE_MS })
}

const kinds = {
  alone: ({ detail }) => toast('warn', t('message.alone'), detail),
  lost: ({ name, detail, rendering }) =>
    toast('warn', t('message.lost', { name }), [detail, rendering && t('message.lostNext')].filter(Boolean).join('\n')),
  back: ({ name }) => toast('success', t('message.back', { name }), t('message.backNext'))
}

export function showMessages() {
  api.addEventListener('monarch.message', (event) => kinds[event.detail.kind]?.(event.detail))
}
