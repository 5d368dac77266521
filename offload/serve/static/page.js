// The chat page: what is shown, and what a click does.

import * as api from "./api.js";
import { allChats, newChat, removeChat, requestOf, saveChat } from "./chats.js";
import { rendered } from "./markdown.js";

const LONG = { characters: 600, lines: 12 }; // longer messages are folded

const $ = id => document.getElementById(id);
const number = value => value.toLocaleString("en");
const size = bytes => bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`;

let current = newChat();
let files = []; // for the next message
let running = null;
let keepsSessions = false;

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function fail(error) {
  if (error.name === "AbortError") return;
  $("error").textContent = error.message;
  if (error.status === 401) $("keyed").hidden = false;
}

// Do it, and stay at the end of the log where that was in view.
function atEnd(change) {
  const log = $("log"), was = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (was) log.scrollTop = log.scrollHeight;
}

// Messages

const folded = (summary, text) =>
  make("details", {}, make("summary", { textContent: summary }), make("div", { className: "plain", textContent: text }));

function showUser({ content, files = [] }) {
  const isLong = content.length > LONG.characters || content.split("\n").length > LONG.lines;
  const text = isLong
    ? folded(`${content.trimStart().slice(0, 80)}… (${number(content.length)} characters)`, content)
    : make("div", { className: "plain", textContent: content });
  const shown = files.map(file => folded(`${file.name} (${number(file.tokens)} tokens)`, file.text));
  $("log").append(make("article", { className: "user", ariaLabel: "You" }, ...shown, ...(content ? [text] : [])));
}

function showAnswer({ content, counts = "" }) {
  const answer = make("div", { className: "markdown" }), line = make("small", { className: "counts", textContent: counts });
  answer.append(rendered(content));
  $("log").append(make("article", { className: "assistant", ariaLabel: "Answer" }, answer, line));
  return { answer, line };
}

async function ask(signal) {
  const message = { role: "assistant", content: "", counts: "" }, start = performance.now();
  const { answer, line } = showAnswer(message);
  const bar = make("progress", { ariaLabel: "Prompt read" });
  const session = keepsSessions ? { session_id: current.name } : {};
  let first = 0, frame = 0, usage = null;
  const draw = () => atEnd(() => { frame = 0; answer.replaceChildren(rendered(message.content)); line.textContent = message.counts; });
  line.textContent = "Waiting";
  line.before(bar);
  $("log").scrollTop = $("log").scrollHeight;
  try {
    for await (const chunk of api.chat({ ...requestOf(current), ...session }, signal)) {
      const read = chunk.prompt_progress;
      if (read) {
        Object.assign(bar, { max: read.total, value: read.processed });
        line.textContent = `Read ${number(read.processed)} of ${number(read.total)} tokens`;
      }
      usage = chunk.usage ?? usage;
      const text = chunk.choices[0]?.delta?.content;
      if (!text) continue;
      if (!first) { first = performance.now(); bar.remove(); current.messages.push(message); }
      message.content += text;
      message.counts = countsOf(usage, first - start, performance.now() - first);
      frame ||= requestAnimationFrame(draw);
    }
  } finally {
    cancelAnimationFrame(frame);
    bar.remove();
    draw();
  }
  if (!first) throw new Error("The model ended its answer before the first word.");
}

function countsOf(usage, untilFirst, since) {
  const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: { cached_tokens: cached } } = usage;
  return [
    `${number(tokens)} tokens`,
    ...(since > 0 && tokens > 1 ? [`${((tokens - 1) * 1000 / since).toFixed(1)} tokens/s`] : []),
    `first after ${(untilFirst / 1000).toFixed(1)} s`,
    `prompt ${number(prompt)} tokens${cached ? `, ${number(cached)} of them cached` : ""}`,
  ].join(" · ");
}

$("form").onsubmit = async event => {
  event.preventDefault();
  const content = $("text").value.trim();
  if (running || !(content || files.length)) return;
  const message = { role: "user", content, files };
  current.messages.push(message);
  showUser(message);
  $("text").value = $("error").textContent = "";
  files = [];
  showFiles();
  running = new AbortController();
  setBusy(true);
  save();
  try { await ask(running.signal); } catch (error) { fail(error); }
  running = null;
  setBusy(false);
  takeBack();
  save();
  refresh();
};

function setBusy(busy) {
  $("log").ariaBusy = busy;
  $("send").disabled = $("manage").disabled = busy;
  $("stop").disabled = !busy;
}

// A message that has no answer may be changed and sent again.
function takeBack() {
  if (current.messages.at(-1)?.role !== "user") return;
  const message = current.messages.pop();
  $("text").value ||= message.content;
  files = [...message.files, ...files];
  showFiles();
  showMessages();
}

$("stop").onclick = () => running?.abort();
$("text").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
};

// Files

function showFiles() {
  $("files").replaceChildren(...files.map(file => {
    const remove = make("button", { type: "button", textContent: "×", ariaLabel: `Remove ${file.name}` });
    remove.onclick = () => { files = files.filter(other => other !== file); showFiles(); };
    return make("li", {}, `${file.name}: ${number(file.tokens)} tokens`, remove);
  }));
}

async function read(file) {
  const bytes = await file.arrayBuffer();
  let text;
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); }
  catch { throw new Error("it is not text in UTF-8"); }
  const { count, max_model_len: most } = await api.tokenize(text);
  if (count >= most) throw new Error(`it has ${number(count)} tokens; the context has ${number(most)}`);
  return { name: file.name, text, tokens: count };
}

$("file").onchange = async () => {
  const chosen = [...$("file").files];
  $("file").value = $("error").textContent = "";
  for (const file of chosen) {
    try { files.push(await read(file)); }
    catch (error) { fail(Object.assign(error, { message: `${file.name}: ${error.message}` })); }
  }
  showFiles();
};

// Chats

function showMessages() {
  $("log").replaceChildren();
  for (const message of current.messages) (message.role === "user" ? showUser : showAnswer)(message);
  $("log").scrollTop = $("log").scrollHeight;
}

function showChats() {
  const begins = chat => (chat.messages[0]?.content || chat.messages[0]?.files[0].name || "").slice(0, 40);
  const chats = allChats().filter(chat => chat.name !== current.name);
  $("chats").replaceChildren(...[current, ...chats].map(chat =>
    make("option", { value: chat.name, textContent: begins(chat) ? `${chat.name}: ${begins(chat)}` : chat.name })));
}

function open(chat) {
  current = chat;
  $("error").textContent = $("text").value = "";
  files = [];
  for (const id of ["name", "system", "temperature"]) $(id).value = chat[id];
  showFiles();
  showMessages();
  takeBack();
  showChats();
  refresh();
}

function save() {
  try {
    if (current.messages.length) saveChat(current);
    else removeChat(current.name);
  } catch (error) { fail(error); }
  showChats();
}

$("new").onclick = () => { open(newChat()); $("text").focus(); };
$("chats").onchange = () => open(allChats().find(chat => chat.name === $("chats").value));
$("system").onchange = () => { current.system = $("system").value.trim(); save(); };
$("temperature").onchange = () => {
  if ($("temperature").reportValidity()) { current.temperature = $("temperature").value; save(); }
};

async function forget(name) {
  if (keepsSessions) await api.removeSession(name).catch(error => { if (error.status !== 404) throw error; });
  removeChat(name);
}

$("delete").onclick = async () => {
  if (!confirm(`Delete ${current.name}?`)) return;
  try { await forget(current.name); open(allChats()[0] ?? newChat()); }
  catch (error) { fail(error); }
};

$("name").onchange = async () => {
  const name = $("name").value, old = current.name;
  $("error").textContent = "";
  try {
    if (!name || !$("name").reportValidity()) throw new Error("A name has letters of English, digits and . _ - only, the first of them no dot.");
    const taken = [...allChats().map(chat => chat.name), ...(keepsSessions ? await api.sessions() : []).map(each => each.id)];
    if (name !== old && taken.includes(name)) throw new Error(`There is a chat or a session ${name} already.`);
    await forget(old);
    current.name = name;
    save();
    refresh();
  } catch (error) { $("name").value = old; fail(error); }
};

// The server

// What it is, and where its KV cache is: of all requests, and of beginnings that are kept.
async function refresh() {
  try {
    const props = await api.props();
    const most = props.kv_host_budget_bytes, gpu = props.kv_device_bytes;
    keepsSessions = props.sessions;
    $("model").textContent = document.title = props.model;
    $("kv").textContent = `KV cache: ${size(props.kv_host_bytes)}${most ? ` of ${size(most)}` : ""} in host memory`
      + (gpu ? `, ${size(gpu)} on the GPU` : "");
    const session = keepsSessions && (await api.sessions()).find(each => each.id === current.name);
    $("kept").textContent = session ? `The server keeps ${number(session.tokens ?? 0)} tokens of it (${session.where}).` : "";
  } catch (error) { fail(error); }
}

$("key").onchange = () => { api.setKey($("key").value); $("error").textContent = ""; refresh(); };
open(newChat());
