// COCO's run-length masks: counts of pixels outside, inside, outside, ... down the columns of the whole picture.

const MAX_COUNTS = 4e6;
const MAX_PIXELS = 2e8;

/** Run lengths of COCO's string (5 bits a character, 0x20: more follow, differences two runs back) or a list; else null. */
export function counts(code) {
  if (Array.isArray(code)) return code.every((n) => Number.isInteger(n) && n >= 0) ? code : null;
  if (typeof code !== "string" || code.length > MAX_COUNTS) return null;
  const out = [];
  for (let place = 0; place < code.length; ) {
    let value = 0;
    let weight = 1;
    for (let more = true; more; ) {
      const digit = code.charCodeAt(place++) - 48;
      if (!(digit >= 0 && digit < 64) || weight > 2 ** 30) return null; // also past the end, where it is NaN
      value += (digit & 0x1f) * weight;
      weight *= 32;
      more = (digit & 0x20) !== 0;
      if (!more && digit & 0x10) value -= weight;
    }
    if (out.length > 2) value += out[out.length - 2];
    if (value < 0) return null;
    out.push(value);
  }
  return out;
}

/** The mask at width x height as Uint8Array of 0 and 1 in rows; null for what is no mask. Each pixel asks one source pixel. */
export function decode(mask, width, height) {
  const size = mask?.size;
  if (!Array.isArray(size) || size.length !== 2 || !size.every((n) => Number.isInteger(n) && n > 0)) return null;
  const [rows, columns] = size;
  const runs = rows * columns <= MAX_PIXELS ? counts(mask.counts) : null;
  if (runs === null || runs.reduce((sum, n) => sum + n, 0) !== rows * columns) return null;
  const out = new Uint8Array(width * height);
  let run = 0;
  let end = runs[0] ?? 0; // of the run, counted down the columns
  for (let x = 0, before = -1; x < width; x++) {
    const first = Math.min(columns - 1, Math.floor(((x + 0.5) * columns) / width)) * rows;
    if (first === before) {
      // The same column of the mask again, in a picture larger than it: the runs are read on, never back.
      for (let at = x; at < out.length; at += width) out[at] = out[at - 1];
      continue;
    }
    before = first;
    for (let y = 0; y < height; y++) {
      const at = first + Math.min(rows - 1, Math.floor(((y + 0.5) * rows) / height));
      while (at >= end) end += runs[++run];
      out[y * width + x] = run & 1;
    }
  }
  return out;
}
