// Keys, and the list of them.

import { h, one } from './dom.js';
import { go, state } from './state.js';

const KEYS = [
  [['←', '↑', '↓', '→'], 'select another datapoint; also h j k l'],
  [['Enter'], 'open the selected datapoint'],
  [['Esc'], 'close it'],
  [['['], [']'], 'the page before, the page after'],
  [['Home'], ['End'], 'the first and the last datapoint of those shown'],
  [['g'], 'go to an index'],
  [['/'], 'filter datapoints, or the names of a folder'],
  [['t'], 'tiles or table'],
  [['d'], ['a'], 'data, about'],
  [['Space'], 'play a video or sequence of the open datapoint'],
  [['b'], 'folders'],
  [['?'], 'this list'],
];

export function showHelp() {
  const dialog = one('#help');
  const rows = KEYS.flatMap((row) => [
    h('dt', {}, row.slice(0, -1).flat().map((key) => h('kbd', {}, key))),
    h('dd', {}, row.at(-1)),
  ]);
  dialog.replaceChildren(h('h1', {}, 'Keyboard'), h('dl', {}, rows));
  if (!dialog.open) dialog.showModal();
}

const STEPS = {
  ArrowLeft: [-1, 0], h: [-1, 0], ArrowRight: [1, 0], l: [1, 0],
  ArrowUp: [0, -1], k: [0, -1], ArrowDown: [0, 1], j: [0, 1],
};

export function bindKeys({ browser, toggleTree }) {
  one('#help').addEventListener('click', () => one('#help').close());
  addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || one('#help').open) return;
    const { target, key } = event;
    if (target.matches('input:not([type="range"]), select, textarea')) {
      if (key === 'Escape') target.blur();
      return;
    }
    if (target.matches('input[type="range"], video, audio') && (key.startsWith('Arrow') || key === ' ')) return;
    if (target.matches('button, a, summary') && (key === 'Enter' || key === ' ')) return;
    if (act(key, browser(), toggleTree)) event.preventDefault();
  });
}

function focus(selector) {
  const field = one(selector);
  field?.focus();
  field?.select();
  return Boolean(field);
}

/** Do what a key stands for. Returns whether it stands for something. */
function act(key, browser, toggleTree) {
  if (key === '?') return showHelp(), true;
  if (key === 'b') return toggleTree(), true;
  if (key === 'Escape') {
    if (state().open) go({ open: false });
    return state().open;
  }
  if (key === '/') {
    if (browser && state().tab !== 'data') go({ tab: 'data' });
    return focus('.filter input');
  }
  if (!browser) return false;
  if (key === 'd') return go({ tab: 'data' }), true;
  if (key === 'a') return go({ tab: 'about', open: false }), true;
  if (state().tab !== 'data') return false;
  if (key in STEPS) return browser.step(...STEPS[key]), true;
  if (key === 'Enter') return go({ open: true }), true;
  if (key === '[' || key === ']') return browser.turn(key === '[' ? -1 : 1), true;
  if (key === 'Home') return browser.to(0), true;
  if (key === 'End') return browser.to(browser.total - 1), true;
  if (key === 't') return browser.toggle(), true;
  if (key === 'g') return focus('.jump');
  if (key === ' ') {
    const player = one('#detail video, #detail audio');
    if (player) player.paused ? player.play() : player.pause();
    else one('#detail .play')?.click();
    return Boolean(one('#detail'));
  }
  return false;
}
