// Requests to the server.

let key = "";

export function setKey(value) { key = value; }

async function request(path, method = "GET", body = undefined, signal = undefined) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) })
    .catch(error => { throw error.name === "AbortError" ? error : new Error("The server cannot be reached."); });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const message = answer?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
  throw Object.assign(new Error(message), { status: response.status });
}

export const props = async () => (await request("props")).json();

export const sessions = async () => (await (await request("v1/sessions")).json()).data;

export const removeSession = name => request(`v1/sessions/${encodeURIComponent(name)}`, "DELETE");

export const tokenize = async prompt =>
  (await request("tokenize", "POST", { prompt, add_special_tokens: false })).json();

// The chunks of a streamed answer.
export async function* chat(body, signal) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const response = await request("v1/chat/completions", "POST",
    { ...body, stream: true, stream_options: options, return_progress: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(error => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
