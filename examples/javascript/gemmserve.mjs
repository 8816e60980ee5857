// Matrix products on a gemmserve server, from Node.js (20 or newer) and from browsers. It needs nothing but fetch.
//
//   const client = new Gemmserve('http://127.0.0.1:8000', key);
//   const d = await client.gemm({ dtype: 'complex64', shape: [2, 2], data: new Float32Array(8) }, b, { trans_a: 'C' });
//
// A server answers pages of its own origin alone: in a browser, serve the page from behind the same proxy.

import { decode, encode } from './npy.mjs';

/** Return 128 random bits. (crypto.randomUUID is missing in pages that come without TLS.) */
function randomKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

/** What the server refuses: `slug` ("shape-mismatch"), `status`, and the whole `problem` (RFC 9457). */
export class GemmserveError extends Error {
  constructor(problem, status) {
    super(problem.title ? `${problem.title}: ${problem.detail}` : `HTTP status ${status}`);
    this.name = 'GemmserveError';
    this.slug = problem.type?.split('/').pop();
    this.status = status;
    this.problem = problem;
  }
}

/** A server, and the key to it. Methods take and return arrays as npy.mjs has them; each throws GemmserveError. */
export class Gemmserve {
  #url;
  #headers;

  constructor(url, key) {
    this.#url = url.replace(/\/$/, '');
    this.#headers = key ? { Authorization: `Bearer ${key}` } : {};
  }

  /** Send a request; return the Response. A body that is a plain object goes as JSON. */
  async request(method, path, body, headers = {}) {
    const plain = body?.constructor === Object;
    const response = await fetch(this.#url + path, {
      method,
      body: plain ? JSON.stringify(body) : body,
      headers: { ...(plain && { 'Content-Type': 'application/json' }), ...headers, ...this.#headers },
    });
    if (response.ok) return response;
    const isProblem = response.headers.get('Content-Type')?.startsWith('application/problem+json');
    throw new GemmserveError(isProblem ? await response.json() : {}, response.status);
  }

  /** Upload an array; return its ArrayInfo, whose `id` jobs take as an operand until it is deleted. */
  async upload(array, query = {}) {
    const path = `/v1/arrays?${new URLSearchParams(query)}`;
    return (await this.request('POST', path, encode(array), { 'Content-Type': 'application/x-npy' })).json();
  }

  /** Return the array of that id. */
  async download(id) {
    const answer = await this.request('GET', `/v1/arrays/${id}/data`, undefined, { Accept: 'application/x-npy' });
    return decode(await answer.arrayBuffer());
  }

  /** Delete the array of that id. */
  async remove(id) {
    await this.request('DELETE', `/v1/arrays/${id}`);
  }

  /** Return alpha op(a) op(b), computed in one exchange; nothing is kept on the server. */
  async gemm(a, b, params = {}) {
    const form = new FormData();
    form.append('params', JSON.stringify(params));
    form.append('a', new Blob([encode(a)]), 'a.npy');
    form.append('b', new Blob([encode(b)]), 'b.npy');
    return decode(await (await this.request('POST', '/v1/gemm', form)).arrayBuffer());
  }

  /** Submit a job on stored arrays and wait for its end; return it.
   *
   * It is on record before the server answers: it survives the end of this program and of the server. Whoever sends
   * it again, after an answer that was lost, with the same key does not have it done twice.
   */
  async job(request, key = randomKey()) {
    const headers = { Prefer: 'wait=30', 'Idempotency-Key': key };
    let job = await (await this.request('POST', '/v1/jobs', request, headers)).json();
    while (job.state === 'queued' || job.state === 'running') {
      job = await (await this.request('GET', `/v1/jobs/${job.id}?wait=30`)).json();
    }
    if (job.state !== 'succeeded') throw new GemmserveError(job.error ?? { title: 'Job', detail: job.state }, 200);
    return job;
  }
}
