// Figures and times as people read them. Pure functions; null and undefined are "–".

const NONE = "–";
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["", "k", "M", "G", "T", "P", "E"];

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** Three significant digits, without an exponent: 0.123, 1.23, 12.3, 123, 1234. */
export function short(value) {
  if (missing(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  const digits = size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return String(Number(value.toFixed(digits)));
}

function scaled(value, units, step, suffix) {
  if (missing(value)) return NONE;
  let index = 0;
  // 999.5 would be written as 1000: the next unit is its own.
  while (Math.abs(value) >= step - 0.5 && index < units.length - 1) {
    value /= step;
    index += 1;
  }
  return `${short(value)} ${units[index]}${suffix}`.trimEnd();
}

/** Bytes: "45.4 GiB". */
export const bytes = (value) => scaled(value, BINARY, 1024, "");

/** Any unit with a decimal prefix: si(1.4e13, "FLOP/s") is "14 TFLOP/s". */
export const si = (value, unit = "") => scaled(value, DECIMAL, 1000, unit);

export const percent = (share) => (missing(share) ? NONE : `${Math.round(share * 100)} %`);

/** Whole numbers with their thousands apart. */
export const count = (value) => (missing(value) ? NONE : value.toLocaleString("en"));

/** A duration: "52 ms", "1.2 s", "3 min 4 s", "2 h 5 min", "3 d 4 h". */
export function seconds(value) {
  if (missing(value)) return NONE;
  if (value < 0) return `-${seconds(-value)}`;
  if (value === 0) return "0 s";
  // What would be written as 1000, or as 60 s, is one of the next unit.
  if (value < 0.9995e-6) return `${short(value * 1e9)} ns`;
  if (value < 0.9995e-3) return `${short(value * 1e6)} µs`;
  if (value < 0.9995) return `${short(value * 1e3)} ms`;
  if (value < 59.95) return `${short(value)} s`;
  const whole = Math.max(Math.floor(value), 60);
  const [large, small] =
    whole < 3600 ? [[60, "min"], [1, "s"]] : whole < 86400 ? [[3600, "h"], [60, "min"]] : [[86400, "d"], [3600, "h"]];
  const rest = Math.floor((whole % large[0]) / small[0]);
  return `${Math.floor(whole / large[0])} ${large[1]}${rest ? ` ${rest} ${small[1]}` : ""}`;
}

/** "3 min ago", in whole units. */
export function ago(then, now) {
  const passed = Math.max(now - then, 0);
  if (passed < 1) return "now";
  const [size, unit] = passed < 60 ? [1, "s"] : passed < 3600 ? [60, "min"] : passed < 86400 ? [3600, "h"] : [86400, "d"];
  return `${Math.floor(passed / size)} ${unit} ago`;
}

/** "3 x 4 x 5"; of a scalar "scalar". */
export const shape = (extents) => (extents.length ? extents.join(" × ") : "scalar");
