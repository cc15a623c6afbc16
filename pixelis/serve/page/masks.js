// Decodes COCO's run-length masks: counts of pixels outside, inside, outside, ... column by column.

const MAX_COUNTS = 4e6;
const MAX_PIXELS = 2e8;

/** Run lengths of COCO's string or of a list; null for anything else.
 *
 * A character holds 5 bits, 0x20 marks a continuation, and each length is the difference to that two runs before.
 */
export function counts(code) {
  if (Array.isArray(code)) return code.every((n) => Number.isInteger(n) && n >= 0) ? code : null;
  if (typeof code !== "string" || code.length > MAX_COUNTS) return null;
  const lengths = [];
  for (let position = 0; position < code.length; ) {
    let value = 0;
    let weight = 1;
    for (let more = true; more; ) {
      const digit = code.charCodeAt(position++) - 48;
      if (!(digit >= 0 && digit < 64) || weight > 2 ** 30) return null; // also past the end, where the digit is NaN
      value += (digit & 0x1f) * weight;
      weight *= 32;
      more = (digit & 0x20) !== 0;
      if (!more && digit & 0x10) value -= weight;
    }
    if (lengths.length > 2) value += lengths[lengths.length - 2];
    if (value < 0) return null;
    lengths.push(value);
  }
  return lengths;
}

/** The mask at width x height by nearest neighbour: a Uint8Array of 0 and 1, row by row; null for an invalid mask. */
export function decode(mask, width, height) {
  const size = mask?.size;
  if (!Array.isArray(size) || size.length !== 2 || !size.every((n) => Number.isInteger(n) && n > 0)) return null;
  const [rows, columns] = size;
  const runs = rows * columns <= MAX_PIXELS ? counts(mask.counts) : null;
  if (runs === null || runs.reduce((sum, n) => sum + n, 0) !== rows * columns) return null;
  const out = new Uint8Array(width * height);
  let run = 0;
  let end = runs[0] ?? 0; // index of the first pixel after the run
  for (let x = 0, previous = -1; x < width; x++) {
    const first = Math.min(columns - 1, Math.floor(((x + 0.5) * columns) / width)) * rows;
    if (first === previous) {
      // The same column of the mask again: copy it, because the runs can only be read forwards.
      for (let at = x; at < out.length; at += width) out[at] = out[at - 1];
      continue;
    }
    previous = first;
    for (let y = 0; y < height; y++) {
      const at = first + Math.min(rows - 1, Math.floor(((y + 0.5) * rows) / height));
      while (at >= end) end += runs[++run];
      out[y * width + x] = run & 1;
    }
  }
  return out;
}
