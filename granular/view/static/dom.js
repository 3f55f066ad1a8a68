// Elements. Text is only ever set as text: nothing of a dataset is parsed as markup.

/** Create an element: attributes, `on...` listeners, and children, of which strings become text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an element of SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const one = (selector) => document.querySelector(selector);

/** Announce a text to screen readers. */
export function announce(text) {
  one('#status').textContent = text;
}

/** A box that says what went wrong. */
export function failure(error) {
  return h('div', { class: 'message bad', role: 'alert' }, error.message);
}
