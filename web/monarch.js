// Monarch's part of ComfyUI's page: the sidebar tab, messages and settings. Everything else is in the files beside this.

import { app } from '../../scripts/app.js'
import { el } from './dom.js'
import { showLines } from './line.js'
import { showMessages } from './messages.js'
import { showPanel } from './panel.js'
import { settings } from './settings.js'
import { attend, listen } from './state.js'
import { t } from './strings.js'

let hidePanel = () => {}

app.registerExtension({
  name: 'Monarch',
  settings,
  setup() {
    document.head.append(el('link', { rel: 'stylesheet', href: new URL('./monarch.css', import.meta.url).href }))
    listen()
    showMessages()
    showLines()
    app.extensionManager.registerSidebarTab({
      id: 'monarch',
      icon: 'pi pi-clone',
      title: t('tab'),
      tooltip: t('tab'),
      type: 'custom',
      render(container) {
        hidePanel()
        hidePanel = showPanel(container)
        attend(true).catch(() => {})
      },
      destroy() {
        hidePanel()
        hidePanel = () => {}
        attend(false).catch(() => {})
      }
    })
  }
})
