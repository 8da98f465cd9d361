/* Updates of the fleet page. The page is complete without this script.
 *
 * An event says that something has changed. The page then requests its own address again, with the tag of what it has,
 * and replaces what differs: elements with `data-live` are blocks, their children have keys. The policy of the page
 * allows no inline script, and all texts in it are escaped. */

const ANNOUNCE_MS = 5000;
const POLL_MS = 30000;
const AGO_MS = 15000;
const DAY_S = 86400;

const status = document.getElementById("connection");
const announcement = document.getElementById("announcement");
const pause = document.getElementById("pause");
const clock = new Intl.DateTimeFormat("sv-SE", {dateStyle: "short", timeStyle: "medium"});
const sources = new WeakMap(); // the HTML of a row as the server sent it
let paused = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
let generation = document.body.dataset.generation;
let state = document.body.dataset.state;
let etag = "";
let fresh = null; // the last document of the server
let source = null;
let timer = 0;
let retry = 0;
let busy = false;
let again = false;
let announcedAt = 0;
let announceTimer = 0;

/* Times: in the zone of the browser, in UTC when the pointer is over them. */

function lasting(seconds) {
  const steps = [[DAY_S, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 0, ""]];
  for (const [size, unit, small, name] of steps) {
    if (seconds < size) continue;
    const rest = small ? Math.floor((seconds % size) / small) : 0;
    return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${name}` : ""}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
}

function showTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const at = Date.parse(time.dateTime);
    const age = (Date.now() - at) / 1000;
    if (!time.title) time.title = `${time.textContent} UTC`;
    const local = clock.format(at);
    const known = age >= -5 && age < 3650 * DAY_S;
    const since = age < 60 ? "just now" : `${lasting(age).split(" ").slice(0, 2).join(" ")} ago`;
    const text = time.className === "age" && known ? lasting(age) : local + (known ? ` (${since})` : "");
    if (time.textContent !== text) time.textContent = text;
  }
}

/* Rows */

function isRead(row) {
  return row.contains(document.activeElement) || row.matches(":hover");
}

function keep(block) {
  for (const row of block.children) sources.set(row, row.outerHTML);
}

/* Whether more than current values differ, which change all the time. */
function isChange(old, row) {
  const [one, other] = [old, row].map((each) => {
    const copy = document.createElement("template");
    copy.innerHTML = each;
    for (const value of copy.content.querySelectorAll(".use")) value.remove();
    return copy.innerHTML;
  });
  return one !== other;
}

/* Makes a block like the fresh one. A row that is read does not change, and no row moves while one is read. */
function swap(block, wanted, marked) {
  const rows = new Map(Array.from(block.children, (row) => [row.dataset.key, row]));
  const reading = Array.from(block.children).some(isRead);
  const order = [];
  for (const next of wanted.children) {
    const old = rows.get(next.dataset.key);
    const html = next.outerHTML;
    if (old && (sources.get(old) === html || isRead(old))) {
      order.push(old);
      continue;
    }
    const made = document.importNode(next, true);
    sources.set(made, html);
    showTimes(made);
    if (old) {
      if (marked && !block.matches("[data-live=readings]") && isChange(sources.get(old) || "", html)) made.classList.add("changed");
      old.replaceWith(made);
    } else if (reading) {
      continue;
    }
    order.push(made);
  }
  if (reading) return;
  const kept = new Set(order);
  for (const row of Array.from(block.children)) if (!kept.has(row)) row.remove();
  order.forEach((row, index) => {
    if (block.children[index] !== row) block.insertBefore(row, block.children[index] || null);
  });
  // A section whose blocks have no rows is hidden.
  const section = block.closest("[data-optional]");
  if (section) section.hidden = !section.querySelector("[data-live] > *");
}

function swapAll(marked) {
  if (!fresh || paused) return;
  for (const wanted of fresh.querySelectorAll("[data-live]")) {
    const block = document.querySelector(`[data-live="${CSS.escape(wanted.dataset.live)}"]`);
    if (block) swap(block, wanted, marked);
  }
}

/* One sentence in five seconds at most; the last one counts. */
function announce(text) {
  clearTimeout(announceTimer);
  announceTimer = setTimeout(() => {
    announcedAt = Date.now();
    announcement.textContent = text;
  }, Math.max(0, announcedAt + ANNOUNCE_MS - Date.now()));
}

/* The content of this address again. Changes that are announced meanwhile lead to one more request. */
async function refetch() {
  again = true;
  if (busy) return;
  busy = true;
  try {
    while (again) {
      again = false;
      const headers = etag ? {"If-None-Match": etag} : {};
      const answer = await fetch(location.href, {headers, cache: "no-store"});
      if (answer.status === 304) continue;
      const found = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!found.body.dataset.generation) {
        status.textContent = "The server does not show this page any more; refresh it.";
        disconnect();
        return;
      }
      etag = answer.headers.get("ETag") || "";
      fresh = found;
      swapAll(true);
      if (found.body.dataset.state !== state) announce(found.body.dataset.state);
      state = found.body.dataset.state;
    }
  } finally {
    busy = false;
  }
}

/* Connection */

function connect() {
  disconnect();
  if (paused || document.hidden) return;
  source = new EventSource(`${document.body.dataset.events}&generation=${encodeURIComponent(generation)}`);
  source.addEventListener("changed", (event) => {
    generation = event.lastEventId;
    refetch().catch(lost);
  });
  source.addEventListener("end", () => later(0));
  source.addEventListener("open", () => {
    retry = 0;
    status.textContent = "Updated live.";
  });
  source.addEventListener("error", () => {
    lost();
    // After an error response, such as with too many viewers, the browser does not try again: the page is polled.
    if (source && source.readyState === EventSource.CLOSED) {
      status.textContent = `Updated every ${POLL_MS / 1000} s.`;
      later(POLL_MS);
    }
  });
}

function lost() {
  status.textContent = "No connection; retrying.";
}

function later(delay) {
  disconnect();
  timer = setTimeout(async () => {
    try {
      await refetch();
      timer = setTimeout(connect, 500 * 2 ** Math.min(retry++, 6));
    } catch {
      lost();
      later(POLL_MS);
    }
  }, delay);
}

function disconnect() {
  clearTimeout(timer);
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
  swapAll(false);
  connect();
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
document.addEventListener("focusout", () => setTimeout(swapAll, 0, false));
document.addEventListener("pointerout", () => setTimeout(swapAll, 0, false));
document.addEventListener("visibilitychange", connect);
window.addEventListener("pagehide", disconnect);
setInterval(() => showTimes(document), AGO_MS);

document.querySelectorAll("[data-live]").forEach(keep);
if (window.matchMedia("(max-width: 600px)").matches) {
  for (const fold of document.querySelectorAll("details.fold")) {
    fold.open = Array.from(fold.querySelectorAll("input:not([type=hidden]), select")).some((field) => field.value);
  }
}
document.getElementById("zone").textContent =
  `Times are those of ${Intl.DateTimeFormat().resolvedOptions().timeZone}; the pointer shows UTC.`;
showTimes(document);
showPause();
connect();
