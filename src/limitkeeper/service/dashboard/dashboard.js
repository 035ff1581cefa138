// The dashboard: follows /v1/events, shows rates as differences of counters, and sends what an operator does.
"use strict";
const $ = (id) => document.getElementById(id);
const POINTS = 240, RECENT = 20;                 // of half a second each: two minutes shown, ten seconds for percentages
const SERIES = [["allowed", "passed", "var(--ok)"], ["refused", "refused", "var(--bad)"], ["shadow", "shadow_refused", "var(--shadow)"]];
const history = [];                              // statuses, oldest first
let chosen = "", graph = null, xAxis = null, series = null, streaming = null;

// Requests ---------------------------------------------------------------------------------------------------------
async function api(method, path, body, signal) {
  const headers = {}, token = sessionStorage.getItem("token");
  if (token) headers.authorization = "Bearer " + token;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (response.status === 401) { $("login-answer").textContent = token ? "unknown token" : ""; $("login").showModal(); }
  return response;
}
async function call(method, path, body) {
  const answer = await (await api(method, path, body)).json();
  if (answer.error) throw new Error(answer.error.message);
  return answer;
}
async function follow() {
  streaming?.abort();
  streaming = new AbortController();
  const { signal } = streaming;
  try {
    const response = await api("GET", "/v1/events" + ($("show-keys").checked ? "?keys=shown" : ""), undefined, signal);
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) show(JSON.parse(part.slice(6)));
    }
    throw new Error("disconnected");
  } catch (error) {
    if (signal.aborted) return;
    state("live", "bad", error.message);
    if (!$("login").open) setTimeout(follow, 1000);
  }
}

// Numbers ----------------------------------------------------------------------------------------------------------
const count = (n) => n.toLocaleString("en").replaceAll(",", " ");
const perSecond = (n) => n >= 100 ? count(Math.round(n)) : n.toFixed(n && n < 10 ? 1 : 0);
const micros = (us) => us === null ? "–" : us < 1000 ? us.toFixed(us < 10 ? 1 : 0) + " µs" : (us / 1000).toFixed(1) + " ms";
const ruleOf = (status, name) => status.rules.find((one) => one.name === name);
const sum = (status, field) => status.rules.reduce((all, one) => all + one[field], 0);
const valueOf = (status, field, name) => name ? ruleOf(status, name)?.[field] ?? 0 : sum(status, field);
const increase = (before, now, field, name) => Math.max(0, valueOf(now, field, name) - valueOf(before, field, name));
// A percentile of the decisions between two statuses, interpolated in its bucket (bounds double, in µs).
function percentile(before, now, p) {
  if (!before || !now.latency) return null;
  const counts = now.latency.counts.map((n, i) => Math.max(0, n - before.latency.counts[i]));
  let rest = p * counts.reduce((a, b) => a + b, 0);
  if (!rest) return null;
  const bounds = [0, ...now.latency.bounds_us];
  for (let i = 0; i < counts.length; i++) {
    if (rest <= counts[i]) return bounds[i] + ((bounds[i + 1] ?? bounds[i]) - bounds[i]) * rest / counts[i];
    rest -= counts[i];
  }
  return bounds.at(-1);
}

// Showing ----------------------------------------------------------------------------------------------------------
function state(id, kind, text) { $(id).className = "state " + kind; $(id).textContent = text; }
function cells(row, ...values) {
  for (const value of values) {
    const cell = row.insertCell();
    if (typeof value === "object") cell.append(value);
    else cell.textContent = value;
    if (typeof value === "number" || /^[\d\s.]+$/.test(value)) cell.className = "n";
  }
  return row;
}
function rows(id, found, fill, empty) {
  const body = document.createElement("tbody");
  for (const one of found) fill(body.insertRow(), one);
  if (!found.length) cells(body.insertRow(), empty).cells[0].colSpan = 9;
  body.id = id;
  if ($(id).innerHTML !== body.innerHTML) $(id).replaceWith(body);
}
function button(text, act, label) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}
function show(now) {
  const last = history.at(-1);
  if (last && (now.at < last.at || now.service !== last.service)) history.length = 0;
  if (!last || last.policy.version !== now.policy.version) showPolicy(now);
  history.push(now);
  if (history.length > POINTS + 1) history.shift();
  const recent = history.at(-1 - RECENT) ?? history[0], before = history.at(-3) ?? history[0];
  const seconds = Math.max(0.1, now.at - before.at);
  const rate = (field, name) => increase(before, now, field, name) / seconds;
  const share = (name) => {
    const refused = increase(recent, now, "refused", name), all = refused + increase(recent, now, "passed", name);
    return all ? refused / all : 0;
  };
  state("live", "ok", "live");
  $("rate").textContent = perSecond(Math.max(0, now.requests - before.requests) / seconds);
  $("refused-rate").textContent = perSecond(Math.max(0, now.refused - before.refused) / seconds);
  $("ratio").textContent = (100 * share("")).toFixed(1) + " %";
  $("p50").textContent = micros(percentile(recent, now, 0.5));
  $("p99").textContent = micros(percentile(recent, now, 0.99));
  $("total").textContent = count(now.requests);
  $("workers").textContent = `${now.workers.answered} of ${now.workers.running} workers`;
  const guard = now.store.find((one) => one.state !== undefined), kinds = now.store.map((one) => one.kind).join(" over ");
  state("store", guard && guard.state !== "closed" ? "bad" : "ok", kinds + (guard ? `: breaker ${guard.state}` : ""));
  for (const row of $("rule-rows").rows) {
    const rule = ruleOf(now, row.dataset.rule);
    if (!rule) continue;
    ["passed", "refused", "shadow_refused"].forEach((field, i) => { row.cells[2 + i].textContent = perSecond(rate(field, rule.name)); });
    const meter = row.cells[5].firstChild;
    meter.value = share(rule.name);
    meter.title = meter.textContent = (100 * meter.value).toFixed(1) + " %";
    ["passed", "refused", "shadow_refused", "near"].forEach((field, i) => { row.cells[6 + i].textContent = count(rule[field]); });
  }
  rows("offender-rows", now.offenders, (row, one) => cells(row, one.rule, one.key, count(one.count)), "no refusals");
  rows("store-rows", now.store.flatMap((one) => Object.entries(one).map(([name, value]) => [one.kind, name, value]))
    .filter(([, name]) => name !== "kind" && name !== "since_us"), (row, one) => cells(row, ...one.map(String)), "");
  draw();
}
function showPolicy(now) {
  $("policy").textContent = `policy ${now.policy.name}, version ${now.policy.version}`;
  $("policy").title = now.policy.source;
  rows("rule-rows", now.rules, (row, rule) => {
    const pick = button(rule.name, () => choose(chosen === rule.name ? "" : rule.name), `show ${rule.name} in the chart`);
    row.dataset.rule = rule.name;
    cells(row, pick, (rule.limits ?? []).join("; ") + (rule.action === "shadow" ? " (shadow)" : ""), 0, 0, 0, document.createElement("meter"), 0, 0, 0, 0);
    row.title = rule.description ?? "";
    row.cells[5].className = "";
  }, "the policy has no rules");
  for (const select of document.querySelectorAll("select[name=limit]")) {
    const kept = select.value;
    select.replaceChildren(...now.rules.map((one) => new Option(one.name)));
    if (kept && ruleOf(now, kept)) select.value = kept;
  }
  choose(ruleOf(now, chosen) ? chosen : "");
}
function choose(name) {
  chosen = name;
  $("chart-of").textContent = name || "all rules";
  for (const row of $("rule-rows").rows) row.classList.toggle("chosen", row.dataset.rule === name);
  draw();
}
function draw() {
  if (!window.Rickshaw || history.length < 3) {
    if (!window.Rickshaw) $("chart").textContent = "The charts need: pip install 'limitkeeper[dashboard]'";
    return;
  }
  const points = SERIES.map(([, field]) => history.slice(1).map((now, i) =>
    ({ x: now.at, y: increase(history[i], now, field, chosen) / Math.max(0.1, now.at - history[i].at) })));
  if (!graph) {
    series = SERIES.map(([name, , color], i) => ({ name, color, data: points[i] }));
    graph = new Rickshaw.Graph({ element: $("chart"), renderer: "area", stroke: false, interpolation: "step-after", series, height: 200, padding: { top: 0.1 } });
    new Rickshaw.Graph.Axis.Y({ graph, ticks: 4, orientation: "left", element: $("y-axis"), width: 48, height: 200, berthRate: 0 });
    xAxis = new Rickshaw.Graph.Axis.X({ graph, ticks: 6, orientation: "bottom", element: $("x-axis"), tickFormat: (x) => new Date(x * 1000).toLocaleTimeString("en-GB") });
    new Rickshaw.Graph.HoverDetail({ graph, xFormatter: (x) => new Date(x * 1000).toLocaleTimeString("en-GB"), yFormatter: (y) => y.toFixed(0) + " / s" });
    new ResizeObserver(() => {
      const width = $("chart").clientWidth;
      graph.configure({ width });
      xAxis.setSize({ width, height: 22, auto: false });
      graph.render();
    }).observe($("chart"));
  }
  series.forEach((one, i) => { one.data.splice(0, one.data.length, ...points[i]); });
  graph.update();
}

// Operating --------------------------------------------------------------------------------------------------------
const time = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB");
async function showChanges() {
  const [{ overrides }, { entries }] = await Promise.all([call("GET", "/v1/overrides"), call("GET", "/v1/audit")]);
  rows("override-rows", overrides, (row, one) => cells(row, one.rule, one.key, one.limit, one.until ? time(one.until) : "removed",
    [one.reason, one.by].filter(Boolean).join(", "), button("remove", () => act("DELETE", pathOf("overrides", one.rule, one.key)), `remove the override of ${one.key}`)), "no overrides");
  rows("audit-rows", entries.slice(0, 12), (row, { at, by, action, until, ...rest }) => cells(row, time(at), by,
    [action, ...Object.values(rest).filter((one) => one !== "" && one !== 0)].join(" ")), "nothing was changed");
}
const pathOf = (kind, limit, key) => `/v1/${kind}/${encodeURIComponent(limit)}/${encodeURIComponent(key)}`;
async function act(method, path, body, into) {
  const output = into && $(into);
  try {
    const answer = await call(method, path, body);
    if (output) { output.hidden = false; output.textContent = answer.text ?? JSON.stringify(answer, null, 1); }
    if (answer.status) output.textContent = `answered ${answer.status}\n\n` + output.textContent;
  } catch (error) {
    if (output) { output.hidden = false; output.textContent = error.message; } else state("live", "bad", error.message);
  }
  if (method !== "GET") showChanges().catch(() => {});
}
function onSubmit(id, handle) {
  $(id).addEventListener("submit", (event) => {
    event.preventDefault();
    handle(Object.fromEntries(new FormData(event.target)), event.submitter?.value);
  });
}
onSubmit("try", ({ line }, what) => act("POST", `/v1/${what}`, { line }, "explanation"));
onSubmit("key", (form, what) => {
  const to = what === "block" ? "blocked" : form.to;
  if (what === "inspect") act("GET", pathOf("limits", form.limit, form.key), undefined, "key-answer");
  else if (what === "reset") act("POST", "/v1/reset", { limit: form.limit, key: form.key }, "key-answer");
  else act("PUT", pathOf("overrides", form.limit, form.key), { limit: to, for: form.for || null, reason: form.reason }, "key-answer");
});
onSubmit("load", (form) => act("POST", "/v1/load", { limit: form.limit, rate: +form.rate, seconds: +form.seconds, keys: +form.keys }, "load-answer"));
$("reload").addEventListener("click", () => act("POST", "/v1/reload", {}));
$("show-keys").addEventListener("change", follow);
$("login").addEventListener("close", () => {
  const given = $("login").querySelector("input").value;
  if (given) sessionStorage.setItem("token", given);
  start();
});
function start() { follow(); showChanges().catch(() => {}); }
setInterval(() => showChanges().catch(() => {}), 5000);
start();
