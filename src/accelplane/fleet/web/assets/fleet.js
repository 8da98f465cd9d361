/* Updates of the fleet page. The page is complete without this script.
 *
 * The server sends trees: a text, or [tag, attributes, ...children]. Texts become text nodes, and only known attributes
 * are set, so nothing that is received can become markup or a script. Elements with `data-live` are blocks; their
 * children have keys. */

const TAGS = new Set(["a", "b", "br", "code", "dd", "div", "dl", "dt", "li", "nav", "p", "pre", "span", "td", "th", "time", "tr", "ul"]);
const ATTRIBUTES = /^(class|href|title|scope|colspan|datetime|rel|tabindex|role|id|(aria|data)-[a-z-]+)$/;
const ANNOUNCE_MS = 5000;
const POLL_MS = 30000;
const AGO_MS = 15000;

const status = document.getElementById("connection");
const announcement = document.getElementById("announcement");
const pause = document.getElementById("pause");
const deferred = new Map(); // what waits until a block is not being read any more: block name → {set, order}
let paused = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
let generation = document.body.dataset.generation;
let source = null;
let poll = 0;
let retry = 0;
let announcedAt = 0;
let announceTimer = 0;

/* Trees */

function build(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const [tag, attributes, ...children] = tree;
  if (!TAGS.has(tag)) throw new Error(`unexpected element ${tag}`);
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (!ATTRIBUTES.test(name)) continue;
    if (name === "href" && !/^https?:$/.test(new URL(value, location.href).protocol)) continue;
    made.setAttribute(name, value);
  }
  made.append(...children.map(build));
  return made;
}

/* Times */

function ago(seconds) {
  const steps = [[86400, "d"], [3600, "h"], [60, "min"]];
  for (const [size, unit] of steps) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  return "just now";
}

function showTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const age = (Date.now() - Date.parse(time.dateTime)) / 1000;
    let note = time.nextElementSibling;
    if (!note || !note.classList.contains("ago")) {
      note = document.createElement("span");
      note.className = "ago";
      time.after(note);
    }
    const text = age >= -5 && age < 3.2e8 ? ` (${ago(age)})` : "";
    if (note.textContent !== text) note.textContent = text;
  }
}

/* Blocks */

function isRead(row) {
  return row.contains(document.activeElement) || row.matches(":hover");
}

function rowsOf(block) {
  return new Map(Array.from(block.children, (row) => [row.dataset.key, row]));
}

function apply(name, change, marked) {
  const block = document.querySelector(`[data-live="${CSS.escape(name)}"]`);
  if (!block) return;
  const rows = rowsOf(block);
  const later = {set: {}, order: null};
  for (const [key, tree] of Object.entries(change.set)) {
    const old = rows.get(key);
    if (old && isRead(old)) {
      later.set[key] = tree;
      continue;
    }
    const made = build(tree);
    showTimes(made);
    if (old) {
      if (marked && name !== "readings") made.classList.add("changed");
      old.replaceWith(made);
    } else if (change.order) {
      block.append(made);
    }
    rows.set(key, made);
  }
  if (change.order) {
    // Rows do not move while one of them is being read.
    if (Array.from(rows.values()).some(isRead)) later.order = change.order;
    else arrange(block, change.order);
  }
  if (later.order || Object.keys(later.set).length) deferred.set(name, later);
  showOptional(block);
}

/* A section whose blocks have no rows is hidden. */
function showOptional(block) {
  const section = block.closest("[data-optional]");
  if (section) section.hidden = !section.querySelector("[data-live] > *");
}

function arrange(block, order) {
  const rows = rowsOf(block);
  let next = block.firstElementChild;
  for (const key of order) {
    const row = rows.get(key);
    if (!row) continue;
    rows.delete(key);
    if (row === next) next = next.nextElementSibling;
    else block.insertBefore(row, next);
  }
  for (const row of rows.values()) row.remove();
}

function update(blocks) {
  for (const [name, change] of Object.entries(blocks)) {
    const waiting = deferred.get(name);
    deferred.delete(name);
    const merged = waiting ? {set: {...waiting.set, ...change.set}, order: change.order || waiting.order} : change;
    apply(name, merged, true);
  }
}

function applyDeferred() {
  if (!deferred.size || paused) return;
  const waiting = Array.from(deferred);
  deferred.clear();
  for (const [name, change] of waiting) apply(name, change, false);
}

/* One sentence in five seconds at most; the last one counts. */
function announce(text) {
  if (!text) return;
  clearTimeout(announceTimer);
  announceTimer = setTimeout(() => {
    announcedAt = Date.now();
    announcement.textContent = text;
  }, Math.max(0, announcedAt + ANNOUNCE_MS - Date.now()));
}

/* The whole page again, without a move of focus or scroll position. */
async function refetch() {
  const answer = await fetch(location.href, {headers: {Accept: "text/html"}, cache: "no-store"});
  const text = await answer.text();
  const found = new DOMParser().parseFromString(text, "text/html");
  if (!found.body.dataset.generation) {
    status.textContent = "The server does not show this page any more; refresh it.";
    return;
  }
  generation = found.body.dataset.generation;
  for (const fresh of found.querySelectorAll("[data-live]")) {
    const block = document.querySelector(`[data-live="${CSS.escape(fresh.dataset.live)}"]`);
    if (!block || block.matches(":focus-within")) continue;
    block.replaceChildren(...Array.from(fresh.children, (row) => document.adoptNode(row)));
    showTimes(block);
    showOptional(block);
  }
  deferred.clear();
}

/* Connection */

function receive(event) {
  generation = event.lastEventId || generation;
  const data = JSON.parse(event.data);
  update(data.blocks);
  announce(data.announcement);
}

function connect() {
  disconnect();
  if (paused) return;
  const address = document.body.dataset.events;
  const opened = new EventSource(`${address}&generation=${encodeURIComponent(generation)}`);
  source = opened;
  opened.addEventListener("overview", receive);
  opened.addEventListener("rows", receive);
  opened.addEventListener("reload", () => {
    disconnect();
    reload();
  });
  opened.addEventListener("open", () => {
    retry = 0;
    status.textContent = "Updated live.";
  });
  opened.addEventListener("error", () => {
    status.textContent = "No connection; retrying.";
    // After an error response, such as with too many viewers, the browser does not try again: the page is polled.
    if (opened.readyState === EventSource.CLOSED) {
      disconnect();
      status.textContent = `Updated every ${POLL_MS / 1000} s.`;
      poll = setTimeout(reload, POLL_MS);
    }
  });
}

async function reload() {
  try {
    await refetch();
    retry = Math.min(retry + 1, 6);
  } catch {
    retry = 6;
    status.textContent = "No connection; retrying.";
  }
  poll = setTimeout(connect, 500 * 2 ** retry);
}

function disconnect() {
  clearTimeout(poll);
  if (source) source.close();
  source = null;
}

/* Controls */

function showPause() {
  pause.hidden = false;
  pause.textContent = paused ? "Resume updates" : "Pause updates";
  if (paused) status.textContent = "Updates are paused.";
}

pause.addEventListener("click", () => {
  paused = !paused;
  showPause();
  if (paused) disconnect();
  else connect();
});

for (const form of document.querySelectorAll('form[method="get"]')) {
  form.addEventListener("submit", () => {
    // Empty fields are left out, so that the address stays short.
    for (const field of form.elements) if (field.name && !field.value) field.disabled = true;
  });
}
window.addEventListener("pageshow", () => {
  for (const field of document.querySelectorAll("form :disabled")) field.disabled = false;
});
document.addEventListener("focusout", () => setTimeout(applyDeferred, 0));
document.addEventListener("pointerout", () => setTimeout(applyDeferred, 0));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) disconnect();
  else connect();
});
window.addEventListener("pagehide", disconnect);
setInterval(() => showTimes(document), AGO_MS);

showTimes(document);
showPause();
connect();
