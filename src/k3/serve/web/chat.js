// A conversation: streaming, stop, regenerate. Text is only ever put in as text, never as HTML.
import { $, call } from "./common.js";

const messages = [];  // {role, content, reasoning}
let running = null;   // AbortController of the reply in progress

/** Fenced code blocks become <pre>; everything else stays text. */
function fill(node, text) {
  node.replaceChildren();
  text.split(/^```[^\n]*\n?/m).forEach((part, i) => {
    if (!part) return;
    if (i % 2 === 0) {
      node.append(part);
    } else {
      const pre = document.createElement("pre");
      pre.tabIndex = 0;  // scrolls sideways, so the keyboard must reach it
      pre.textContent = part.replace(/\n$/, "");
      node.append(pre);
    }
  });
}

function addBubble(role) {
  $("log").querySelector(".empty")?.remove();
  const node = document.createElement("div");
  node.className = `message ${role}`;
  const reasoning = document.createElement("details");
  reasoning.hidden = true;
  reasoning.innerHTML = "<summary>Thinking</summary><div></div>";
  const body = document.createElement("div");
  const note = document.createElement("div");
  note.className = "note";
  node.append(reasoning, body, note);
  $("log").append(node);
  return {
    node,
    set(message) {
      reasoning.hidden = !message.reasoning;
      reasoning.lastChild.textContent = message.reasoning ?? "";
      // Open while there is nothing but thinking to look at.
      if (message.streaming) reasoning.open = !message.content;
      fill(body, message.content);
      note.textContent = message.note ?? "";
      $("log").scrollTop = $("log").scrollHeight;
    },
  };
}

function draw() {
  $("log").replaceChildren();
  if (messages.length === 0) {
    const empty = document.createElement("p");
    empty.className = "quiet empty";
    empty.textContent = "Nothing said yet.";
    $("log").append(empty);
  }
  for (const message of messages) addBubble(message.role).set(message);
  buttons();
}

function buttons() {
  $("send").disabled = running !== null;
  $("stop").disabled = running === null;
  $("again").disabled = running !== null || !messages.some((m) => m.role === "user");
}

function number(id) {
  const value = $(id).value.trim();
  return value === "" ? undefined : Number(value);
}

function requestBody() {
  const history = messages.map(({ role, content, reasoning }) =>
    reasoning ? { role, content, reasoning_content: reasoning } : { role, content });
  const system = $("system").value.trim();
  if (system) history.unshift({ role: "system", content: system });
  const body = {
    model: $("model").textContent, messages: history, stream: true,
    stream_options: { include_usage: true },
  };
  for (const id of ["temperature", "top_p", "max_tokens", "seed", "presence_penalty"]) {
    body[id] = number(id);  // undefined is left out of the JSON
  }
  body.reasoning_effort = $("reasoning_effort").value || undefined;
  return body;
}

/** The data of each server-sent event, one after the other. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((l) => l.startsWith("data:"))
        .map((l) => l.slice(5).trimStart()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function failure(response) {
  try {
    const { error } = await response.json();
    return error.param ? `${error.param}: ${error.message}` : error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function timing(start, first, usage) {
  if (!usage) return;
  const decode = (performance.now() - first) / 1000;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const speed = usage.completion_tokens > 1 && decode > 0
    ? `${((usage.completion_tokens - 1) / decode).toFixed(1)} tokens/s` : "";
  $("timing").textContent = [`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`,
    cached ? `${cached} cached` : "", `first after ${((first - start) / 1000).toFixed(2)} s`, speed]
    .filter(Boolean).join(", ");
}

const notes = { length: "(cut off: the most tokens were reached)", error: "(failed)" };

async function reply() {
  const message = { role: "assistant", content: "", reasoning: "", streaming: true };
  const bubble = addBubble("assistant");
  $("notice").hidden = true;
  running = new AbortController();
  buttons();
  const start = performance.now();
  let first = 0, usage = null;
  try {
    const response = await call("v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const { content, reasoning_content: thought } = choice.delta;
      if (content || thought) first ||= performance.now();
      message.content += content ?? "";
      message.reasoning += thought ?? "";
      message.note = notes[choice.finish_reason] ?? message.note;
      bubble.set(message);
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    message.note = stopped ? "(stopped)" : "";
    if (!stopped) {
      $("notice").textContent = error.message;
      $("notice").hidden = false;
    }
  }
  running = null;
  message.streaming = false;
  if (message.content || message.reasoning) {
    messages.push(message);
    bubble.set(message);
    timing(start, first || performance.now(), usage);
  } else {
    bubble.node.remove();
  }
  buttons();
}

function send(event) {
  event?.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  addBubble("user").set(messages.at(-1));
  $("prompt").value = "";
  reply();
}

function again() {
  while (messages.length > 0 && messages.at(-1).role === "assistant") messages.pop();
  draw();
  reply();
}

export function startChat() {
  $("composer").addEventListener("submit", send);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("again").addEventListener("click", again);
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    $("timing").textContent = "";
    $("notice").hidden = true;
    draw();
    $("prompt").focus();
  });
  draw();
}
