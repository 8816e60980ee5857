// NumPy's .npy files in memory: {dtype, shape, data}, in row-major order as NumPy's arrays by default.
//
// data is a typed array; of complex numbers it holds real and imaginary parts in turns.

const TYPES = {
  '<f4': ['float32', Float32Array, 1],
  '<f8': ['float64', Float64Array, 1],
  '<c8': ['complex64', Float32Array, 2],
  '<c16': ['complex128', Float64Array, 2],
  '<i8': ['int64', BigInt64Array, 1],
};

/** Return the bytes of the .npy file of an array, a Uint8Array. Throws TypeError. */
export function encode({ dtype, shape, data }) {
  const found = Object.entries(TYPES).find(([, [name]]) => name === dtype);
  if (!found) throw new TypeError(`arrays of dtype ${dtype} cannot be written here`);
  const [descr, [, Numbers, parts]] = found;
  const count = parts * shape.reduce((product, n) => product * n, 1);
  if (!(data instanceof Numbers) || data.length !== count) {
    throw new TypeError(`${dtype} of shape ${shape} needs a ${Numbers.name} of ${count}`);
  }
  const extents = shape.map((n) => `${n}, `).join('');
  let header = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${extents}), }`;
  header = header.padEnd(Math.ceil((11 + header.length) / 64) * 64 - 11) + '\n'; // data begin at a multiple of 64
  const head = new TextEncoder().encode('\x00NUMPY\x01\x00\x00\x00' + header);
  head[0] = 0x93;
  new DataView(head.buffer).setUint16(8, header.length, true);
  const bytes = new Uint8Array(head.length + data.byteLength);
  bytes.set(head);
  bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), head.length);
  return bytes;
}

/** Return the array of a .npy file, given as an ArrayBuffer; `order` is "C" or "F". Throws TypeError. */
export function decode(buffer) {
  const view = new DataView(buffer);
  const magic = new TextDecoder('latin1').decode(new Uint8Array(buffer, 0, Math.min(6, buffer.byteLength)));
  if (magic !== '\x93NUMPY') throw new TypeError('no .npy file');
  const wide = view.getUint8(6) > 1; // the header's length has 2 bytes in version 1.0, 4 later
  const begin = wide ? 12 : 10;
  const end = begin + (wide ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = new TextDecoder('latin1').decode(new Uint8Array(buffer, begin, end - begin));
  const descr = /'descr': *'([^']*)'/.exec(header)[1];
  const shape = (/'shape': *\(([^)]*)\)/.exec(header)[1].match(/\d+/g) ?? []).map(Number);
  const order = /'fortran_order': *True/.test(header) ? 'F' : 'C';
  if (!(descr in TYPES)) throw new TypeError(`arrays of dtype ${descr} cannot be read here`);
  const [dtype, Numbers] = TYPES[descr];
  return { dtype, shape, order, data: new Numbers(buffer.slice(end)) };
}
