// Opens the caller's picture or clip, and shrinks it if the service would refuse it.

import { isAnimated, openClip } from "./clip.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** A picture that cannot be used. The message says what to do. */
export class BadPicture extends Error {}

const CLIPS = ["video/mp4", "video/webm"];

/** As openPicture, or of a clip { url, clip, note }, which plays on the stage. `limits` has its `max_video_*` too. */
export async function openMedia(file, limits) {
  if (!CLIPS.includes(file.type) && !(await isAnimated(file))) return openPicture(file, limits);
  if (file.size + 8192 > limits.max_video_bytes) throw new BadPicture(`The clip has ${(file.size / 1e6).toFixed(1)} MB: choose one of at most ${((limits.max_video_bytes - 8192) / 1e6).toFixed(1)} MB.`);
  const clip = await openClip(file).catch(() => {
    throw new BadPicture("This browser cannot play the clip: save it as MP4 with H.264, or as WebM.");
  });
  if (clip.duration > limits.max_video_seconds) {
    clip.release();
    throw new BadPicture(`The clip is too long: choose one of at most ${limits.max_video_seconds} s.`);
  }
  return { url: await dataUrl(file), clip, note: `${clip.width} × ${clip.height} pixels, ${clip.duration.toFixed(1)} s` };
}

/** { url, element, note } of an image file. `limits` has the service's `max_body_bytes` and `max_image_pixels`. */
export async function openPicture(file, limits) {
  if (file.type && !file.type.startsWith("image/")) throw new BadPicture("This is not a picture or a clip: choose a PNG, JPEG, WebP, GIF or BMP file, or a clip as MP4 or WebM.");
  const objectUrl = URL.createObjectURL(file);
  try {
    const image = await loadImage(objectUrl);
    const pixels = image.naturalWidth * image.naturalHeight;
    const maxLength = limits.max_body_bytes - 8192; // for the question and the JSON around it
    if (TYPES.includes(file.type) && pixels <= limits.max_image_pixels && (file.size * 4) / 3 < maxLength) {
      const url = await dataUrl(file);
      return { url, element: await loadImage(url), note: `${image.naturalWidth} × ${image.naturalHeight} pixels` };
    }
    return await shrink(image, Math.min(1, Math.sqrt(limits.max_image_pixels / pixels)), maxLength, file.type);
  } finally {
    URL.revokeObjectURL(objectUrl);
  }
}

/** Call `use(file)` for a file dropped anywhere or pasted while `view` is shown; `zone` is marked while one is over the page. */
export function onFile(view, zone, use) {
  const onDrag = (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files") || view.hidden) return;
    event.preventDefault();
    zone.classList.toggle("over", event.type === "dragover");
    if (event.type === "drop") use(event.dataTransfer.files[0]);
  };
  for (const name of ["dragover", "dragleave", "drop"]) window.addEventListener(name, onDrag);
  window.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((item) => /^(image|video)\//.test(item.type));
    if (!file || view.hidden) return;
    event.preventDefault();
    use(file);
  });
}

async function shrink(image, scale, maxLength, type) {
  const canvas = document.createElement("canvas");
  for (let i = 0; i < 12; i++, scale *= 0.8) {
    canvas.width = Math.max(1, Math.floor(image.naturalWidth * scale));
    canvas.height = Math.max(1, Math.floor(image.naturalHeight * scale));
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    for (const url of type === "image/png" ? [canvas.toDataURL("image/png"), canvas.toDataURL("image/jpeg", 0.92)] : [canvas.toDataURL("image/jpeg", 0.92)]) {
      if (url.length > 100 && url.length < maxLength) {
        const remark = scale < 1 ? ", made smaller to fit this service" : "";
        return { url, element: await loadImage(url), note: `${canvas.width} × ${canvas.height} pixels${remark}` };
      }
    }
  }
  throw new BadPicture("This picture is too large for the browser and the service: make it smaller first.");
}

async function loadImage(url) {
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
  } catch {
    throw new BadPicture("This browser cannot read the picture: save it as PNG or JPEG and choose that.");
  }
  if (!image.naturalWidth) throw new BadPicture("The picture has no size in pixels: save it as PNG and choose that.");
  return image;
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new BadPicture("The file cannot be read: choose it again."));
  reader.readAsDataURL(file);
});
