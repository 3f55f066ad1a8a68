// What is shown is in the hash of the address, so that a link shows the same.
//
// #/folder/dataset?tab=about, or ?look=table&at=123&open&key=label&is=%3D&text=3&sort=score&down
// Key, relation and text come once for each condition of the filter.

const listeners = [];
let current = parse();

function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, '').split('?', 2);
  const fields = new URLSearchParams(query || '');
  const at = fields.get('at') || '';
  let names;
  try {
    names = path.split('/').filter(Boolean).map(decodeURIComponent);
  } catch {
    names = [];
  }
  return {
    path: names.join('/'),
    tab: fields.get('tab') === 'about' ? 'about' : 'data',
    look: fields.get('look') || '',
    cover: fields.get('cover') || '',
    at: /^\d{1,15}$/.test(at) ? Number(at) : null, // by default, the first that is shown
    open: fields.has('open'),
    where: fields.getAll('key').map((key, i) => ({ key, is: fields.getAll('is')[i] ?? '', text: fields.getAll('text')[i] ?? '' })),
    sort: fields.get('sort') || '',
    down: fields.has('down'),
  };
}

export function hash(state) {
  const fields = new URLSearchParams();
  if (state.tab === 'about') fields.set('tab', 'about');
  for (const name of ['look', 'cover', 'sort']) if (state[name]) fields.set(name, state[name]);
  for (const one of state.where) for (const [name, text] of Object.entries(one)) fields.append(name, text);
  if (state.at !== null) fields.set('at', state.at);
  for (const name of ['down', 'open']) if (state[name]) fields.set(name, '');
  const query = `${fields}`.replace(/(?<=^|&)(down|open)=(?=&|$)/g, '$1');
  return `#/${state.path.split('/').filter(Boolean).map(encodeURIComponent).join('/')}${query && `?${query}`}`;
}

export const state = () => current;

/** Show something else. Small steps replace the entry of the history. */
export function go(change, { replace = false } = {}) {
  const next = { ...current, ...change };
  const target = hash(next);
  if (target === hash(current)) return;
  history[replace ? 'replaceState' : 'pushState'](null, '', target);
  update(next);
}

/** A state of another folder, without the position in this one. */
export const fresh = (path, change = {}) => ({
  path, tab: 'data', look: '', cover: '', at: null, open: false, where: [], sort: '', down: false, ...change,
});

export function watch(listener) {
  listeners.push(listener);
}

function update(next) {
  const before = current;
  current = next;
  for (const listener of listeners) listener(next, before);
}

addEventListener('popstate', () => update(parse()));
