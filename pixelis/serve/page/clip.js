// A clip that plays on the stage: a video element, or the decoded frames of an animated GIF.

const MAX_GIF_FRAMES = 600;

/** The clip of a file, muted and repeating; rejects what the browser cannot play. `source` is what to draw now. */
export async function openClip(file) {
  return file.type === "image/gif" ? gif(await decodeGif(file)) : video(file);
}

/** Whether a GIF moves. Browsers without ImageDecoder, which exists only over HTTPS and on localhost, show GIFs as pictures. */
export async function isAnimated(file) {
  if (file.type !== "image/gif" || typeof ImageDecoder === "undefined") return false;
  const decoder = new ImageDecoder({ data: await file.arrayBuffer(), type: file.type });
  try {
    await Promise.all([decoder.completed, decoder.tracks.ready]);
    return decoder.tracks.selectedTrack.frameCount > 1;
  } catch {
    return false;
  } finally {
    decoder.close();
  }
}

async function video(file) {
  const element = document.createElement("video");
  Object.assign(element, { muted: true, loop: true, playsInline: true, preload: "auto", src: URL.createObjectURL(file) });
  const release = () => {
    element.pause();
    URL.revokeObjectURL(element.src);
  };
  try {
    await new Promise((resolve, reject) => {
      element.onloadeddata = resolve;
      element.onerror = reject;
    });
    if (!element.videoWidth) throw new Error("no picture");
  } catch (error) {
    release();
    throw error;
  }
  return {
    source: element, release,
    get width() { return element.videoWidth; },
    get height() { return element.videoHeight; },
    get duration() { return element.duration; },
    get time() { return element.currentTime; },
    set time(value) { element.currentTime = value; },
    get paused() { return element.paused; },
    play: () => element.play().catch(() => {}), // the next call may interrupt it
    pause: () => element.pause(),
  };
}

async function decodeGif(file) {
  const decoder = new ImageDecoder({ data: await file.arrayBuffer(), type: file.type });
  await Promise.all([decoder.completed, decoder.tracks.ready]);
  const frames = [];
  let end = 0;
  for (let i = 0; i < Math.min(decoder.tracks.selectedTrack.frameCount, MAX_GIF_FRAMES); i++) {
    const { image } = await decoder.decode({ frameIndex: i });
    frames.push({ bitmap: await createImageBitmap(image), start: end });
    end += (image.duration ?? 100_000) / 1e6;
    image.close();
  }
  decoder.close();
  return { frames, duration: end };
}

function gif({ frames, duration }) {
  let at = 0;
  let since = null; // performance.now() of the start, null while paused
  const time = () => (since === null ? at : (at + (performance.now() - since) / 1000) % duration);
  return {
    duration, release: () => frames.forEach(({ bitmap }) => bitmap.close()),
    width: frames[0].bitmap.width, height: frames[0].bitmap.height,
    get source() { return frames.findLast(({ start }) => start <= time()).bitmap; },
    get time() { return time(); },
    set time(value) {
      at = Math.min(value, duration);
      if (since !== null) since = performance.now();
    },
    get paused() { return since === null; },
    play: () => { since ??= performance.now(); },
    pause: () => {
      at = time();
      since = null;
    },
  };
}

/** The seconds of a track's frames, between the frames of the clip whose times are known: [[number, seconds], ...]. */
export function frameTimes(numbers, known) {
  const points = [...new Map(known)].sort(([a], [b]) => a - b);
  if (points.length < 2) return null;
  return numbers.map((number) => {
    const i = Math.min(Math.max(points.findIndex(([n]) => n >= number), 1), points.length - 1);
    const [[n0, t0], [n1, t1]] = [points[i - 1], points[points.at(-1)[0] < number ? points.length - 1 : i]];
    return t0 + ((number - n0) / (n1 - n0)) * (t1 - t0);
  });
}
