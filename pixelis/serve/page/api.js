// Requests to the service: the API key of this tab, JSON, event streams, and explanations of failures.

const STORAGE_KEY = "pixelis-key";
let memory = ""; // used where the browser allows no session storage

export function key() {
  try {
    return sessionStorage.getItem(STORAGE_KEY) ?? memory;
  } catch {
    return memory;
  }
}

export function setKey(value) {
  memory = value;
  try {
    if (value) sessionStorage.setItem(STORAGE_KEY, value);
    else sessionStorage.removeItem(STORAGE_KEY);
  } catch {
    // private mode: the key lasts as long as the page
  }
}

/** A refused or failed request. `status` is 0 without a reply; `retryAfter` is in seconds or null. */
export class Failure extends Error {
  constructor(status, message, code = "", retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

export const aborted = (error) => error instanceof DOMException && error.name === "AbortError";

async function send(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  // Header values are latin-1. fetch would refuse other characters, and no valid key has them.
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
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // a proxy's error page: the status is enough
  }
  const retryAfter = Number.parseFloat(response.headers.get("retry-after") ?? "");
  throw new Failure(response.status, String(detail.message ?? ""), String(detail.code ?? ""), Number.isFinite(retryAfter) ? retryAfter : null);
}

export async function request(path, options) {
  const response = await send(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (aborted(error)) throw error;
    throw new Failure(0, "the connection ended before the reply did");
  }
}

/** POST, and call `onEvent(name, data)` for every event. A plain JSON reply counts as one `answer`. */
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
    throw new Failure(0, "the connection ended before the reply did");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Parses server-sent events from chunks of text that may be cut anywhere. */
export class Events {
  constructor(onEvent) {
    Object.assign(this, { onEvent, chunks: [], name: "", data: [] });
  }

  push(text) {
    // Joined once per line: a line with a picture arrives in many chunks.
    const lines = text.split("\n");
    this.chunks.push(lines[0]);
    for (const next of lines.slice(1)) {
      this.line(this.chunks.join("").replace(/\r$/, ""));
      this.chunks = [next];
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

/** Two sentences about a failure: what happened, and what to do. */
export function explain(error) {
  if (!(error instanceof Failure)) return ["This page has failed.", `Reload it and try again. (${error})`];
  const reason = error.message ? `The service says: ${error.message}.` : "";
  const wait = error.retryAfter ? `Try again in ${Math.ceil(error.retryAfter)} s.` : "Try again in a moment.";
  switch (error.status) {
    case 0:
      return [error.message ? `No complete reply: ${error.message}.` : "The service cannot be reached.", "Check that it runs and that you are online, then try again."];
    case 400:
    case 422:
      return ["The service cannot use this request.", reason || "Change the question or the picture."];
    case 401:
      return [key() ? "The service does not accept this key." : "The service requires a key.", "Enter the key from the operator of the service at the top of this page."];
    case 403:
      return ["This is not allowed.", reason];
    case 404:
      return ["The service cannot find this.", reason];
    case 408:
      return ["The upload took too long.", "Use a smaller picture or a faster connection."];
    case 409:
      return ["This has already been decided, or is not possible now.", reason];
    case 413:
      return ["The picture is too large for this service.", `Use a smaller one. ${reason}`];
    case 429:
      return ["The service has too many questions to answer.", wait];
    case 503:
      return ["The service cannot answer at the moment.", wait];
    case 504:
      return ["There was no answer in time.", "Try again, with fewer samples if it happens again."];
    default:
      return [`The service failed (${error.status}).`, `${reason} Try again. The service's log has the cause.`];
  }
}
