// What the server and the model are doing, from /metrics and /v1/k3/telemetry.
import { $, call } from "./common.js";
import { byLabel, parse, quantiles, total } from "./metrics.js";

const POLL_MS = 2000, WINDOW_MS = 60000;

const MISSES = { nothing: "nothing begins alike", no_snapshot: "no snapshot there" };

const history = [];  // {time, families}, oldest first, one minute
let timer = null;

// ---- small pieces

function format(value, digits = 1) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(digits);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) value /= 1024, unit++;
  return `${value.toFixed(unit === 0 ? 0 : 1)} ${units[unit]}`;
}

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

function sparkline(values) {
  const top = Math.max(...values, 1e-9);
  const points = values.map((v, i) =>
    `${(100 * i / Math.max(1, values.length - 1)).toFixed(1)},${(26 - 24 * v / top).toFixed(1)}`);
  return `<svg viewBox="0 0 100 28" preserveAspectRatio="none" aria-hidden="true">` +
    `<polyline points="${points.join(" ")}"/></svg>`;
}

function card(name, value, series) {
  const node = document.createElement("div");
  node.className = "card";
  if (series) node.innerHTML = sparkline(series);
  const figure = document.createElement("b");
  figure.textContent = value;
  const label = document.createElement("span");
  label.className = "quiet";
  label.textContent = name;
  node.prepend(label, figure);
  return node;
}

/** Rows of a label, a bar and a figure; says so when there is nothing. */
function bars(id, rows, show = format) {
  const node = $(id);
  node.replaceChildren();
  const top = Math.max(...rows.map((r) => r[2] ?? r[1]), 1e-12);
  for (const [name, value] of rows) {
    const label = document.createElement("span"), figure = document.createElement("span");
    label.textContent = name;
    figure.textContent = show(value);
    const bar = document.createElement("i"), part = document.createElement("i");
    part.style.width = `${Math.max(0, Math.min(100, 100 * value / top))}%`;
    bar.append(part);
    node.append(label, bar, figure);
  }
  if (rows.length === 0) node.append(Object.assign(document.createElement("span"), {
    className: "quiet", textContent: "nothing yet" }));
}

// ---- figures from two scrapes

/** Per second over the last scrapes; null before there are two. */
function rate(name, from = history.at(0), to = history.at(-1)) {
  if (!from || !to || to.time <= from.time) return null;
  const a = total(from.families, name), b = total(to.families, name);
  return a === null || b === null ? null : Math.max(0, b - a) / ((to.time - from.time) / 1000);
}

function rates(name) {
  return history.slice(1).map((to, i) => rate(name, history[i], to) ?? 0);
}

function drawCards(now) {
  const recent = history.at(-4) ?? history[0];
  $("cards").replaceChildren(
    card("answer tokens/s", format(rate("k3_generated_tokens_total", recent)),
      rates("k3_generated_tokens_total")),
    card("prompt tokens/s", format(rate("k3_prompt_tokens_total", recent)),
      rates("k3_prompt_tokens_total")),
    card("requests running", format(total(now, "k3_requests_running")),
      history.map((h) => total(h.families, "k3_requests_running") ?? 0)),
    card("requests waiting", format(total(now, "k3_requests_waiting")),
      history.map((h) => total(h.families, "k3_requests_waiting") ?? 0)),
    card("requests done", format(total(now, "k3_requests_total"))),
    card("preemptions", format(total(now, "k3_preemptions_total"))));
}

function drawLatency(now) {
  // Until somebody has looked for a minute there is no older scrape to compare with.
  const minute = history.at(-1).time - history[0].time > WINDOW_MS - 2 * POLL_MS;
  const before = minute ? history[0].families : null;
  $("h-latency").textContent = `Latency, ${minute ? "last minute" : "since the start"}`;
  const rows = [
    ["first token", "k3_ttft_seconds"], ["first answer token", "k3_ttfo_seconds"],
    ["between tokens", "k3_itl_seconds"], ["per token of a request", "k3_tpot_seconds"],
    ["in the queue", "k3_queue_seconds"], ["whole request", "k3_e2e_seconds"]];
  const body = $("latency").tBodies[0];
  body.replaceChildren();
  for (const [name, metric] of rows) {
    const { count, values } = quantiles(now, before, metric, [0.5, 0.95, 0.99]);
    const row = body.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    row.append(head);
    for (const v of values) row.insertCell().textContent = seconds(v);
    row.insertCell().textContent = count;
  }
}

function drawBars(now) {
  const limits = byLabel(now, "k3_memory_limit_bytes", "component");
  const memory = Object.entries(byLabel(now, "k3_memory_bytes", "component"));
  bars("memory", [
    ...memory.map(([name, value]) =>
      [name.replaceAll("_", " ") + (limits[name] ? `, of ${bytes(limits[name])}` : ""), value,
        limits[name]]),
    ["process, files included", total(now, "k3_process_resident_bytes") ?? 0],
  ], bytes);
  const prompt = total(now, "k3_prompt_tokens_total");
  const cached = total(now, "k3_prompt_tokens_cached_total");
  const misses = Object.entries(byLabel(now, "k3_prefix_cache_misses_total", "reason"))
    .filter(([, value]) => value > 0)
    .map(([reason, value]) => [MISSES[reason] ?? reason, value]);
  bars("prefix", prompt ? [["tokens cached", cached], ["tokens read", prompt - cached]] : []);
  bars("misses", misses);
  const drafted = total(now, "k3_draft_tokens_total");
  bars("drafts", drafted
    ? [["tokens drafted", drafted], ["of them right", total(now, "k3_draft_tokens_accepted_total")]]
    : []);
}

// ---- matrices from the telemetry

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** One pixel block for each value; rows are layers. The strongest value has the accent colour. */
function heat(id, rows, label) {
  const canvas = $(id), columns = Math.max(1, ...rows.map((r) => r.length));
  const width = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio));
  const height = Math.max(6, Math.min(18, 320 / Math.max(1, rows.length))) * devicePixelRatio;
  canvas.width = width;
  canvas.height = Math.max(1, Math.round(height * rows.length));
  canvas.style.height = `${canvas.height / devicePixelRatio}px`;
  const g = canvas.getContext("2d");
  g.fillStyle = ink("--ground");
  g.fillRect(0, 0, width, canvas.height);
  g.fillStyle = ink("--accent");
  const top = Math.max(...rows.flat(), 1e-12);
  rows.forEach((row, y) => row.forEach((value, x) => {
    g.globalAlpha = Math.max(0, Math.min(1, value / top));
    const left = Math.floor(x * width / columns), right = Math.floor((x + 1) * width / columns);
    g.fillRect(left, Math.floor(y * height), Math.max(1, right - left), Math.ceil(height) - 1);
  }));
  canvas.setAttribute("aria-label", label);
}

function drawTelemetry(data) {
  const layers = data.experts, n = layers[0]?.load.length ?? 0;
  const share = ({ load }) => {
    const sum = load.reduce((a, v) => a + v, 0) || 1;
    return load.map((v) => v / sum);
  };
  const busiest = Math.max(0, ...layers.map((l) => l.max_violation + 1));
  const dead = layers.reduce((sum, l) => sum + l.dead, 0);
  const text = layers.length === 0 ? "No step was looked at yet." :
    `Rows are ${layers.length} layers, columns ${n} experts. The busiest has ` +
    `${busiest.toFixed(2)} times the mean load; ${dead} had no choice in the last ` +
    `${format(layers[0].tokens)} tokens looked at.`;
  heat("experts", layers.map(share), text);
  $("experts-text").textContent = text;
  bars("entropy", layers.map((l) => [`layer ${l.layer}`, l.entropy_bits, Math.log2(n)]),
    (v) => `${v.toFixed(2)} of ${Math.log2(n).toFixed(2)} bits`);
  bars("active", layers.map((l) => [`layer ${l.layer}`, l.active_last_step, n]),
    (v) => `${v} of ${n}`);
  const depth = data.depth_weights;
  const said = depth.length === 0
    ? "This model has no attention over depth, or no step was looked at."
    : "Rows are the places where the stream is read, columns what is read, the live row last.";
  heat("depth", depth.map((d) => d.mean), said);
  $("depth-text").textContent = said;
}

function drawAlerts({ alerts, watched }) {
  const items = [...alerts, ...watched].map((alert) => {
    const item = document.createElement("li");
    item.className = alerts.includes(alert) ? "firing" : "quiet";
    item.textContent = `${alert.signal} (${alert.stratum}): ${alert.state}, distance ` +
      `${format(alert.distance_bits, 3)} of ${format(alert.threshold_bits, 3)} bits`;
    return item;
  });
  if (items.length === 0) {
    items.push(Object.assign(document.createElement("li"), { textContent: "nothing watched yet" }));
  }
  $("alerts").replaceChildren(...items);
}

async function json(path) {
  const response = await call(path);
  return response.ok ? response.json() : null;
}

async function poll() {
  try {
    const response = await call("metrics");
    if (!response.ok) throw new Error(`/metrics answered ${response.status}`);
    const families = parse(await response.text());
    history.push({ time: performance.now(), families });
    while (history.length > 2 && history.at(-1).time - history[0].time > WINDOW_MS) history.shift();
    drawCards(families);
    drawLatency(families);
    drawBars(families);
    const [telemetry, alerts] = await Promise.all([json("v1/k3/telemetry"), json("alerts")]);
    if (telemetry) drawTelemetry(telemetry);
    if (alerts) drawAlerts(alerts);
    $("stale").hidden = true;
  } catch (error) {
    $("stale").textContent = `No new figures: ${error.message}`;
    $("stale").hidden = false;
  }
  if (timer !== null) timer = setTimeout(poll, POLL_MS);
}

export function startDashboard() {
  return {
    /** Polls only while somebody looks. */
    active(on) {
      clearTimeout(timer);
      timer = on ? setTimeout(poll, 0) : null;
    },
  };
}
