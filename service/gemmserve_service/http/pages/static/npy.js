// .npy files, versions 1.0 to 3.0 (numpy.lib.format): float16, float32, float64, complex64, complex128 and int64, in
// C or Fortran order, of either endianness. Pure: runs in browsers and in Node.

const TYPES = {
  f2: { name: "float16", size: 2, complex: false },
  f4: { name: "float32", size: 4, complex: false },
  f8: { name: "float64", size: 8, complex: false },
  i8: { name: "int64", size: 8, complex: false },
  c8: { name: "complex64", size: 8, complex: true },
  c16: { name: "complex128", size: 16, complex: true },
};
const MAGIC = [0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59];
const HEADER = /^\s*\{(?=[^}]*'descr':\s*'([<>|=])([a-z]\d+)')(?=[^}]*'fortran_order':\s*(True|False))(?=[^}]*'shape':\s*\(([\d\s,]*)\))[^}]*\}\s*$/;

/** Error of a body that is no .npy, or one of a type that cannot be shown. */
export class NpyError extends Error {}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/**
 * Reads a whole file. The elements stay where they are; `real(k)` and `imag(k)` are those of the k-th in memory.
 * @param {ArrayBuffer} buffer
 * @returns {{dtype: string, complex: boolean, fortran: boolean, shape: number[], size: number,
 *            real: (k: number) => number, imag: (k: number) => number}}
 */
export function parse(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < 10 || MAGIC.some((byte, index) => view.getUint8(index) !== byte)) {
    throw new NpyError("this is no .npy file");
  }
  const version = view.getUint8(6);
  if (version < 1 || version > 3) throw new NpyError(`.npy of version ${version}, which is not known`);
  const wide = version > 1;
  if (wide && buffer.byteLength < 12) throw new NpyError("the header breaks off");
  const start = wide ? 12 : 10;
  const length = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  if (start + length > buffer.byteLength) throw new NpyError("the header breaks off");
  const text = new TextDecoder(version === 3 ? "utf-8" : "latin1").decode(new Uint8Array(buffer, start, length));
  const match = HEADER.exec(text);
  if (!match) throw new NpyError("the header is not that of an array of numbers");
  const type = TYPES[match[2]];
  if (!type) throw new NpyError(`elements of type ${match[2]} are not shown`);
  const shape = match[4].split(",").filter((part) => part.trim()).map(Number);
  const size = shape.reduce((product, extent) => product * extent, 1);
  const offset = start + length;
  if (!Number.isSafeInteger(size * type.size) || buffer.byteLength - offset !== size * type.size) {
    throw new NpyError(`${buffer.byteLength - offset} bytes of data, where ${shape.join(" x ")} ${type.name} has ${size * type.size}`);
  }
  const little = match[1] !== ">";
  const width = type.complex ? type.size / 2 : type.size;
  const read = {
    2: (at) => half(view.getUint16(at, little)),
    4: (at) => view.getFloat32(at, little),
    8: type.name === "int64" ? (at) => Number(view.getBigInt64(at, little)) : (at) => view.getFloat64(at, little),
  }[width];
  return {
    dtype: type.name,
    complex: type.complex,
    fortran: match[3] === "True",
    shape,
    size,
    real: (k) => read(offset + k * type.size),
    imag: type.complex ? (k) => read(offset + k * type.size + width) : () => 0,
  };
}

/** First matrix of an array: `index(i, j)` is the place of an element. A vector is one row, a scalar one element. */
export function firstMatrix(array) {
  const { shape, fortran } = array;
  const axes = shape.length;
  const rows = axes > 1 ? shape[axes - 2] : 1;
  const columns = axes > 0 ? shape[axes - 1] : 1;
  if (!fortran) return { rows: array.size ? rows : 0, columns: array.size ? columns : 0, index: (i, j) => i * columns + j };
  // In Fortran order the leading axes run fastest; the first matrix is at 0 along each of them.
  const before = shape.slice(0, -2).reduce((product, extent) => product * extent, 1);
  return { rows: array.size ? rows : 0, columns: array.size ? columns : 0, index: (i, j) => before * (i + j * rows) };
}

/**
 * A .npy file in C order; `data`: a Float32Array or Float64Array, of a complex type real and imaginary parts in turn.
 * @returns {Uint8Array}
 */
export function format(dtype, shape, data) {
  const [code, type] = Object.entries(TYPES).find(([, each]) => each.name === dtype) ?? [];
  const fits = { complex64: Float32Array, float32: Float32Array, complex128: Float64Array, float64: Float64Array };
  const size = shape.reduce((product, extent) => product * extent, 1);
  if (!fits[dtype] || !(data instanceof fits[dtype])) throw new NpyError(`no ${dtype} from such data`);
  if (data.byteLength !== size * type.size) throw new NpyError("the data do not fill the shape");
  const extents = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  let text = `{'descr': '<${code}', 'fortran_order': False, 'shape': (${extents}), }`;
  text += " ".repeat((64 - ((10 + text.length + 1) % 64)) % 64) + "\n";
  const file = new Uint8Array(10 + text.length + data.byteLength);
  file.set(MAGIC);
  file.set([1, 0, text.length & 255, text.length >> 8], 6);
  file.set(new TextEncoder().encode(text), 10);
  const view = new DataView(file.buffer, 10 + text.length);
  const width = data.BYTES_PER_ELEMENT;
  data.forEach((value, k) => (width === 4 ? view.setFloat32(4 * k, value, true) : view.setFloat64(8 * k, value, true)));
  return file;
}
