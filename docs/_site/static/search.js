// Search over sections and API entries (entries.js, written by granular_site.py) instead of Sphinx's search over pages:
// words that no page has, such as the names and figures of a pasted message, do not matter, rare words matter most, and
// so does their order.
(() => {
  const SHOWN = 40;
  const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
  const entries = ENTRIES.map(([page, anchor, title, above, text]) => {
    const all = words(`${title} ${text}`);
    const heading = new Set(words(anchor === title ? title.split('.').pop() : title)); // of granular.Path.stat: stat
    return {page, anchor, title, above, text, length: all.length, heading, line: ` ${all.join(' ')} `};
  });
  const counts = new Map(); // word -> [entry, times]
  entries.forEach((entry) => {
    const times = new Map();
    entry.line.trim().split(' ').forEach((word) => times.set(word, (times.get(word) || 0) + 1));
    times.forEach((count, word) => {
      if (!counts.has(word)) counts.set(word, []);
      counts.get(word).push([entry, count]);
    });
  });
  const mean = entries.reduce((sum, entry) => sum + entry.length, 0) / entries.length;

  // Words of the site that a word of the query stands for: itself, longer ones, and its singular.
  const meant = (word) => {
    const found = counts.has(word) ? [[word, 1]] : [];
    if (word.length > 2) {
      for (const other of counts.keys()) {
        if (other !== word && (other.startsWith(word) || (word.endsWith('s') && other === word.slice(0, -1)))) {
          found.push([other, 0.4]);
        }
      }
    }
    return found;
  };

  const rank = (query) => {
    const asked = words(query);
    const scores = new Map();
    let known = 0;
    for (const word of new Set(asked)) {
      const best = new Map();
      for (const [other, weight] of meant(word)) {
        for (const [entry, count] of counts.get(other)) {
          const often = count / (count + 0.5 + (0.5 * entry.length) / mean);
          const value = weight * (often + (entry.heading.has(other) ? 1.5 : 0));
          best.set(entry, Math.max(best.get(entry) || 0, value));
        }
      }
      if (!best.size) continue;
      const rarity = Math.log(1 + entries.length / best.size);
      known += rarity;
      best.forEach((value, entry) => {
        const score = scores.get(entry) || {value: 0, covered: 0};
        score.value += rarity * value;
        score.covered += rarity;
        scores.set(entry, score);
      });
    }
    const results = [...scores].map(([entry, {value, covered}]) => {
      let pairs = 0;
      for (let i = 1; i < asked.length; i++) pairs += entry.line.includes(` ${asked[i - 1]} ${asked[i]} `);
      return {entry, score: (value + 2 * pairs) * (covered / known) ** 2};
    });
    results.sort((a, b) => b.score - a.score || a.entry.title.length - b.entry.title.length);
    return results.filter(({score}) => score > 0.05 * results[0].score).slice(0, SHOWN).map(({entry}) => entry);
  };

  const element = (name, parent, text, className) => {
    const made = parent.appendChild(document.createElement(name));
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  // The part of a text with most of the words, with these marked.
  const excerpt = (parent, text, asked) => {
    const hits = [...text.matchAll(/[\p{L}\p{N}_]+/gu)].filter((match) => asked.some((word) => match[0].toLowerCase().startsWith(word)));
    let start = 0, most = 0;
    hits.forEach((hit, i) => {
      const near = new Set(hits.slice(i).filter((other) => other.index < hit.index + 200).map((other) => other[0].toLowerCase())).size;
      if (near > most) [start, most] = [Math.max(0, hit.index - 40), near];
    });
    const end = start + 280;
    let at = start;
    const paragraph = element('p', parent, start ? '… ' : '', 'context');
    for (const hit of hits.filter((hit) => hit.index >= start && hit.index + hit[0].length <= end)) {
      paragraph.append(text.slice(at, hit.index));
      element('mark', paragraph, hit[0]);
      at = hit.index + hit[0].length;
    }
    paragraph.append(text.slice(at, end) + (end < text.length ? ' …' : ''));
  };

  Search.performSearch = (query) => {
    const out = document.getElementById('search-results');
    const found = rank(query);
    Search._parseQuery(query); // remembers the words that the page then highlights
    element('h1', out, 'Search');
    element('p', out, found.length ? `Best matches for “${query}”` : `Nothing found for “${query}”`, 'search-summary');
    const list = element('ul', out, '', 'search');
    const asked = words(query).filter((word) => word.length > 2);
    const root = document.documentElement.dataset.content_root;
    for (const {page, anchor, title, above, text} of found) {
      const item = element('li', list);
      const link = element('a', item, title);
      link.href = `${root}${page}.html${anchor ? '#' + anchor : ''}`;
      if (above) element('span', item, ` ${above}`, 'above');
      if (text) excerpt(item, text, asked);
    }
  };
})();
