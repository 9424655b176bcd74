// Makes elements. Text is always set as text, never as markup: names and reasons come from other machines.

/** el("p", {class: "hint"}, "text", otherElement); attributes that are functions are event listeners. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') element.addEventListener(name, value)
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? '' : value)
  }
  element.append(...children)
  return element
}

/** Sets an element's text if it is another one: a screen reader would read the same again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text
}

/** A list of terms and values: {element, set({term: text, …})}; a value of undefined hides its line. */
export function terms(labels) {
  const values = {}
  const element = el('dl', { class: 'monarch-terms' })
  for (const [key, label] of Object.entries(labels)) {
    values[key] = el('dd')
    element.append(el('div', {}, el('dt', {}, label), values[key]))
  }
  function set(texts) {
    for (const [key, value] of Object.entries(values)) {
      value.parentElement.hidden = texts[key] === undefined
      setText(value, texts[key] ?? '')
    }
  }
  return { element, set }
}
