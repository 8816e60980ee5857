// Matrices as pictures, with a colour bar. Colours are perceptual: viridis for sizes (B. Smith, S. van der Walt, 2015),
// twilight, which ends where it begins, for phases (B. Bechtold); both from tables of 17 colours, straight between them.

import { h } from "./dom.js";
import { count, shape as shapeText, short } from "./format.js";
import { firstMatrix } from "./npy.js";

const MAPS = {
  viridis: "44015448186a472d7b4240863b528b33638d2c728e26828e21918c1fa08828ae803fbc735ec96284d44baddc30d8e219fde725",
  twilight: "e2d9e2c4ced495b5c77297c16276ba5e51ad592a8f45135c2f14364a1342741e4f983550b25652c27c63cca389d8c7bee2d9e2",
};
const NOT_FINITE = [128, 128, 128];
const MOST = 512;

/** What of each element is shown. */
export const PARTS = {
  magnitude: { name: "|x|", map: "viridis", of: (re, im) => Math.hypot(re, im) },
  decibel: { name: "|x| in dB", map: "viridis", of: (re, im) => 20 * Math.log10(Math.hypot(re, im)) },
  phase: { name: "phase of x", map: "twilight", of: (re, im) => Math.atan2(im, re), range: [-Math.PI, Math.PI] },
  real: { name: "real part of x", map: "viridis", of: (re) => re },
};

/** Red, green and blue at `share`, 0 to 1, of a colour map. */
export function colour(map, share) {
  const table = MAPS[map];
  const last = table.length / 6 - 1;
  const at = Math.min(Math.max(share, 0), 1) * last;
  const left = Math.min(Math.floor(at), last - 1);
  const channel = (k, c) => parseInt(table.slice(6 * k + 2 * c, 6 * k + 2 * c + 2), 16);
  return [0, 1, 2].map((c) => Math.round(channel(left, c) + (at - left) * (channel(left + 1, c) - channel(left, c))));
}

/** Rows and columns at even distances, `most` each at most, of an array's first matrix, as one part of each element. */
export function sampled(array, part, most = MOST) {
  const matrix = firstMatrix(array);
  const rows = Math.min(matrix.rows, most);
  const columns = Math.min(matrix.columns, most);
  const values = new Float64Array(rows * columns);
  let [low, high, strange] = [Infinity, -Infinity, 0];
  for (let i = 0; i < rows; i += 1) {
    const row = Math.floor((i * matrix.rows) / rows);
    for (let j = 0; j < columns; j += 1) {
      const k = matrix.index(row, Math.floor((j * matrix.columns) / columns));
      const value = part.of(array.real(k), array.imag(k));
      values[i * columns + j] = value;
      if (!Number.isFinite(value)) strange += 1;
      else {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  if (part.range) [low, high] = part.range;
  if (part === PARTS.decibel && high - low > 120) low = high - 120; // what is below is as good as nothing
  return { rows, columns, values, low, high, strange, whole: rows === matrix.rows && columns === matrix.columns };
}

function paint(canvas, { rows, columns, values, low, high }, map) {
  canvas.width = Math.max(columns, 1);
  canvas.height = Math.max(rows, 1);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const table = Array.from({ length: 256 }, (_, k) => colour(map, k / 255));
  const scale = 255 / (high - low);
  values.forEach((value, k) => {
    const shade = high > low ? Math.min(Math.max(Math.round((value - low) * scale), 0), 255) : 128;
    image.data.set(Number.isFinite(value) ? table[shade] : NOT_FINITE, 4 * k);
    image.data[4 * k + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}

/** A small picture alone, of |x|; `name` is what it is of. */
export function thumbnail(array, name) {
  const canvas = h("canvas", { class: "thumbnail", role: "img", "aria-label": `|x| of ${name}` });
  paint(canvas, sampled(array, PARTS.magnitude), "viridis");
  return canvas;
}

/** A picture with its colour bar and a caption; `original`: the shape of what `array` is a sample of. */
export function figure(array, partName, { original = null } = {}) {
  const part = PARTS[partName];
  const data = sampled(array, part);
  const extents = original ?? array.shape;
  const matrix = extents.length > 2 ? "first matrix of " : "";
  const known = Number.isFinite(data.low);
  const range = known ? `from ${short(data.low)} to ${short(data.high)}` : "no finite element";
  const canvas = h("canvas", { class: "matrix", role: "img", "aria-label": `${part.name} of ${shapeText(extents)}, ${range}` });
  paint(canvas, data, part.map);
  const ratio = Math.min(Math.max(data.columns / Math.max(data.rows, 1), 0.5), 6);
  canvas.style.aspectRatio = String(Number.isFinite(ratio) && ratio > 0 ? ratio : 1);
  const bar = h("canvas", { "aria-hidden": "true" });
  const steps = Float64Array.from({ length: 256 }, (_, k) => 255 - k);
  paint(bar, { rows: 256, columns: 1, values: steps, low: 0, high: 255 }, part.map);
  const tick = (share) => h("span", {}, short(data.low + share * (data.high - data.low)));
  const notes = [
    `${part.name}, ${matrix}${shapeText(extents)}, ${range}`,
    data.whole && !original ? "" : `; ${data.rows} × ${data.columns} elements at even distances`,
    data.strange ? `; ${count(data.strange)} not finite, in grey` : "",
  ];
  return h("figure", { class: "picture" },
    h("div", { class: "plot" }, canvas,
      known && h("div", { class: "scale" }, bar), known && h("div", { class: "ticks" }, [1, 0.75, 0.5, 0.25, 0].map(tick))),
    h("figcaption", { class: "muted" }, notes.join("")));
}

/** A choice of what is shown, above the picture; `array` as `npy.parse` gives it. */
export function viewer(array, options = {}) {
  const choices = array.complex ? Object.keys(PARTS) : ["magnitude", "decibel", "real"];
  const select = h("select", { onchange: () => place.replaceChildren(figure(array, select.value, options)) },
    choices.map((name) => h("option", { value: name }, PARTS[name].name)));
  const place = h("div", {}, figure(array, "magnitude", options));
  return h("div", { class: "viewer" }, h("label", { class: "inline" }, "Show ", select), place);
}
