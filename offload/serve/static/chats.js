// Chats, which this browser keeps. A chat: {name, system, temperature, messages: [{role, content,
// files: [{name, text, tokens}], counts}]}; a temperature of "" is the server's.

const PREFIX = "offload.chat.";

export function newChat() {
  const unlike = Array.from(crypto.getRandomValues(new Uint8Array(5)), byte => (byte % 36).toString(36)).join("");
  return { name: `chat-${new Date().toISOString().slice(0, 10)}-${unlike}`, system: "", temperature: "", messages: [] };
}

// The last that changed first.
export function allChats() {
  const values = Object.keys(localStorage).filter(key => key.startsWith(PREFIX)).map(key => localStorage[key]);
  return values.map(value => JSON.parse(value)).sort((a, b) => b.changed - a.changed);
}

export function saveChat(chat) {
  try { localStorage[PREFIX + chat.name] = JSON.stringify({ ...chat, changed: Date.now() }); }
  catch { throw new Error("This chat is too long for the browser to keep; it goes on until the page is closed."); }
}

export function removeChat(name) { localStorage.removeItem(PREFIX + name); }

// What the server is sent; files come before the text of their message.
export function requestOf(chat) {
  const content = message =>
    [...(message.files ?? []).map(file => `File ${file.name}:\n\n${file.text}`), message.content].join("\n\n");
  const messages = chat.messages.map(message => ({ role: message.role, content: content(message) }));
  if (chat.system) messages.unshift({ role: "system", content: chat.system });
  return { messages, ...(chat.temperature === "" ? {} : { temperature: Number(chat.temperature) }) };
}
