// Talking to the service: the key of this tab, JSON, streams of events, and failures in words.

const STORED = "pixelis-key";
let memory = ""; // where the browser keeps nothing for us

export function key() {
  try {
    return sessionStorage.getItem(STORED) ?? memory;
  } catch {
    return memory;
  }
}

export function setKey(value) {
  memory = value;
  try {
    if (value) sessionStorage.setItem(STORED, value);
    else sessionStorage.removeItem(STORED);
  } catch {
    // private mode: the key lives as long as the page
  }
}

/** What the service refused, or why it could not be asked. `status` 0: no reply at all. */
export class Failure extends Error {
  constructor(status, message, code = "", wait = null) {
    super(message);
    Object.assign(this, { status, code, wait });
  }
}

export const aborted = (error) => error instanceof DOMException && error.name === "AbortError";

async function send(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  // Header values are latin-1: another key cannot be right, and fetch would refuse to send it.
  if (key()) headers.Authorization = `Bearer ${key().replace(/[^\x21-\xff]/g, "?")}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (aborted(error)) throw error;
    throw new Failure(0, "");
  }
  if (response.ok) return response;
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // a proxy's page: the status says enough
  }
  const wait = Number.parseFloat(response.headers.get("retry-after") ?? "");
  throw new Failure(response.status, String(told.message ?? ""), String(told.code ?? ""), Number.isFinite(wait) ? wait : null);
}

export async function request(path, options) {
  const response = await send(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (aborted(error)) throw error;
    throw new Failure(0, "the reply broke off");
  }
}

/** POST, and call `onEvent(name, data)` for every event as it arrives; a plain JSON reply counts as one `answer`. */
export async function stream(path, body, signal, onEvent) {
  const response = await send(path, { method: "POST", body, signal });
  if (!(response.headers.get("content-type") ?? "").includes("event-stream")) {
    onEvent("answer", await response.json());
    return;
  }
  const parser = new Events((name, data) => {
    if (data === "[DONE]") return;
    onEvent(name, JSON.parse(data));
  });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      parser.push(decoder.decode(value, { stream: true }));
    }
  } catch (error) {
    if (aborted(error) || error instanceof Failure) throw error;
    throw new Failure(0, "the reply broke off");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Server-sent events out of pieces of text, wherever they are cut. */
export class Events {
  constructor(onEvent) {
    Object.assign(this, { onEvent, rest: [], name: "", data: [] });
  }

  push(text) {
    // Pieces are joined once a line ends: a line with a picture comes in many pieces.
    const lines = text.split("\n");
    this.rest.push(lines[0]);
    for (const next of lines.slice(1)) {
      this.line(this.rest.join("").replace(/\r$/, ""));
      this.rest = [next];
    }
  }

  line(line) {
    if (line === "") {
      if (this.data.length) this.onEvent(this.name || "message", this.data.join("\n"));
      Object.assign(this, { name: "", data: [] });
      return;
    }
    const [, field, value] = line.match(/^([^:]*):? ?(.*)$/s);
    if (field === "event") this.name = value;
    else if (field === "data") this.data.push(value);
  }
}

/** A failure as two sentences: what happened and what to do. */
export function explain(error) {
  if (!(error instanceof Failure)) return ["Something on this page went wrong.", `Reload it and try again. (${error})`];
  const told = error.message ? `The service says: ${error.message}.` : "";
  const wait = error.wait ? `Try again in ${Math.ceil(error.wait)} s.` : "Try again in a moment.";
  switch (error.status) {
    case 0:
      return [error.message ? `No complete reply: ${error.message}.` : "The service cannot be reached.", "Check that it runs and that you are online, then try again."];
    case 400:
    case 422:
      return ["The service cannot work with this.", told || "Change the question or the picture."];
    case 401:
      return [key() ? "The service does not take this key." : "The service asks for a key.", "Enter the key that whoever runs it gave you, at the top of this page."];
    case 403:
      return ["This is not allowed here.", told];
    case 404:
      return ["The service does not know this.", told];
    case 408:
      return ["The upload took too long.", "Use a smaller picture or a faster connection."];
    case 409:
      return ["This was decided already, or is not possible now.", told];
    case 413:
      return ["The picture is too large for this service.", `Use a smaller one. ${told}`];
    case 429:
      return ["The service has more questions than it can answer.", wait];
    case 503:
      return ["The service cannot answer at the moment.", wait];
    case 504:
      return ["There was no answer in time.", "Try again, with fewer samples if it happens again."];
    default:
      return [`The service failed (${error.status}).`, `${told} Try again; whoever runs it finds the reason in its log.`];
  }
}
