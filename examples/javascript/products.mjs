// Complex products from JavaScript, each compared with plain loops.
//
//   GEMMSERVE_SERVER=http://127.0.0.1:8000 GEMMSERVE_API_KEY=gs_... node products.mjs
//
// Copy gemmserve.mjs and npy.mjs beside a program of one's own.

import assert from 'node:assert/strict';
import { Gemmserve, GemmserveError } from './gemmserve.mjs';

const client = new Gemmserve(process.env.GEMMSERVE_SERVER ?? 'http://127.0.0.1:8000', process.env.GEMMSERVE_API_KEY);
const [m, k, n] = [96, 64, 32];
const random = (rows, columns) => ({
  dtype: 'complex128',
  shape: [rows, columns],
  data: Float64Array.from({ length: 2 * rows * columns }, () => 2 * Math.random() - 1),
});
const a = random(k, m);
const b = random(k, n);

// The conjugate transpose of a times b, and the sums of |a| |b|, on which the bound of the rounding errors rests.
const expected = new Float64Array(2 * m * n);
const bound = new Float64Array(m * n);
for (let i = 0; i < m; i++) {
  for (let j = 0; j < n; j++) {
    let [re, im, magnitude] = [0, 0, 0];
    for (let p = 0; p < k; p++) {
      const [x, y] = [a.data[2 * (p * m + i)], -a.data[2 * (p * m + i) + 1]];
      const [u, v] = [b.data[2 * (p * n + j)], b.data[2 * (p * n + j) + 1]];
      re += x * u - y * v;
      im += x * v + y * u;
      magnitude += Math.hypot(x, y) * Math.hypot(u, v);
    }
    expected[2 * (i * n + j)] = re;
    expected[2 * (i * n + j) + 1] = im;
    // Each of the two products may be off by half of this (Higham, Accuracy and Stability, 3.1, 3.6).
    bound[i * n + j] = 4 * (k + 2) * Number.EPSILON * magnitude;
  }
}
const difference = (d, i) => Math.hypot(d[2 * i] - expected[2 * i], d[2 * i + 1] - expected[2 * i + 1]);
function check(what, { shape, data }) {
  assert.deepEqual(shape, [m, n]);
  const worst = bound.reduce((most, limit, i) => Math.max(most, difference(data, i) / limit), 0);
  assert(worst <= 1, `${what} exceeds its bound`);
  return worst.toExponential(1);
}

// One product: operands there, result back.
console.log(`gemm: error ${check('the product', await client.gemm(a, b, { trans_a: 'C' }))} of its bound`);

// Operands that are used more than once are uploaded once; jobs on them survive crashes.
const { id: ida } = await client.upload(a, { ttl_s: 3600 });
const { id: idb } = await client.upload(b, { ttl_s: 3600 });
let job = await client.job({ op: 'gemm', a: ida, b: idb, trans_a: 'C' });
check('the result of the job', await client.download(job.result.d));
console.log(`job: ${job.state} by ${job.algorithm}`);

// The power in each column of the product, without the product.
job = await client.job({ op: 'gemm_reduce', a: ida, b: idb, trans_a: 'C', reduce: 'sumsq', axis: 'm' });
const power = await client.download(job.result.sumsq);
assert.deepEqual(power.shape, [n]);
let worst = 0;
for (let j = 0; j < n; j++) {
  let [sum, allowed] = [0, 0];
  for (let i = 0; i < m; i++) {
    const magnitude = Math.hypot(expected[2 * (i * n + j)], expected[2 * (i * n + j) + 1]);
    sum += magnitude ** 2;
    allowed += (2 * magnitude + bound[i * n + j]) * bound[i * n + j];
  }
  worst = Math.max(worst, Math.abs(power.data[j] - sum) / (allowed + 2 * m * Number.EPSILON * sum));
}
assert(worst <= 1, 'the power exceeds its bound');
console.log(`gemm_reduce: error ${worst.toExponential(1)} of its bound`);

// What the server refuses is an error with its explanation.
const problem = await client.gemm(a, b).catch((error) => error);
assert(problem instanceof GemmserveError && problem.slug === 'shape-mismatch', 'shapes that do not fit were accepted');
console.log(problem.message);

await client.remove(ida);
await client.remove(idb);
