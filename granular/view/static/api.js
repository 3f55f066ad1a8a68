// Requests to the server of this page.

function address(name, query) {
  const fields = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const item of Array.isArray(value) ? value : [value]) fields.append(key, item);
  }
  return `/api/${name}?${fields}`;
}

async function ask(name, query, signal) {
  let reply;
  try {
    reply = await fetch(address(name, query), { signal });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error('the server does not answer: has granular view ended?');
  }
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = text || `the server answered ${reply.status}`;
  if (reply.headers.get('Content-Type')?.startsWith('application/json')) message = JSON.parse(text).error;
  throw Object.assign(new Error(message), { wrong: reply.status === 400 }); // it would fail again
}

export async function get(name, query, signal) {
  return (await ask(name, query, signal)).json();
}

/** Get a list of facts with a file each: yields entries whose `blob` is an image, if there is one. */
export async function files(name, query, signal) {
  const data = await (await ask(name, query, signal)).arrayBuffer();
  const size = new DataView(data).getUint32(0, true);
  const entries = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, size)));
  let at = 4 + size;
  for (const entry of entries) {
    if (entry.bytes) entry.blob = new Blob([new Uint8Array(data, at, entry.bytes)], { type: entry.media });
    at += entry.bytes;
  }
  return entries;
}

export const media = (query) => address('media', query);
