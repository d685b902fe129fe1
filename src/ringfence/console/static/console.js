// What pages do beside what they show: stay up to date, follow the keyboard, and log in by a link.
"use strict";

const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// A link's code stands behind `#`, so it is in no request and no log; and it must not stay in the address.
const login = one("#login");
if (login && location.hash.length > 1) {
  one("#credential").value = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
  login.requestSubmit();
}

// ── Times ──

function ago(seconds) {
  const size = Math.abs(seconds);
  if (size < 1) return "just now";
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([each]) => size >= each);
  const said = `${Math.floor(size / unit)} ${name}`;
  return seconds > 0 ? `${said} ago` : `in ${said}`;
}
setInterval(() => {
  for (const each of all("time[data-at]")) {
    const text = ago(Date.now() / 1000 - Number(each.dataset.at));
    if (each.textContent !== text) each.textContent = text;
  }
}, 5000);

// ── Up to date ──
// An event says that something changed; the page is then had again, and what differs takes its place. What a person is
// typing into stays as it is.

let source = null;
let coming = false;
let again = false;

async function refresh() {
  if (coming) { again = true; return; }
  coming = true;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html", "ringfence-refresh": "1" }, redirect: "manual" });
    if (answer.type === "opaqueredirect") location.assign("/console/login");
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const place of all("[data-swap]")) {
      const other = document.importNode(one(`[data-swap="${place.dataset.swap}"]`, fresh) ?? place.cloneNode(false), true);
      merge(place, other);
    }
    if (one("title", fresh)) document.title = one("title", fresh).textContent;
  } catch { /* the gateway is gone for a moment; the stream says when it is back */ } finally {
    coming = false;
    if (again) { again = false; setTimeout(refresh, 300); }
  }
}

function merge(place, other) {
  const held = new Map(all(":scope > [data-key]", place).map((each) => [each.dataset.key, each]));
  const known = held.size > 0;
  const wanted = all(":scope > *", other).map((each) => {
    const old = held.get(each.dataset.key);
    if (!old) { if (known) each.classList.add("fresh"); return each; }
    const same = old.dataset.version === each.dataset.version && each.dataset.version !== undefined;
    return same || old.contains(document.activeElement) ? old : each;
  });
  // Nothing that stays is moved: it would lose the focus.
  for (const each of [...place.children]) {
    if (wanted.includes(each)) continue;
    const replaced = wanted.some((other) => other.dataset.key === each.dataset.key);
    if (place.dataset.settle !== undefined && each.matches("[data-item]") && !replaced) settle(each);
    else each.remove();
  }
  let at = place.firstElementChild;
  let moved = false;
  for (const each of wanted) {
    while (at && at.classList.contains("settled")) at = at.nextElementSibling;
    if (each === at) {
      at = at.nextElementSibling;
      if (moved) hold(each);
    } else {
      place.insertBefore(each, at);
      moved = true;
      if (held.has(each.dataset.key)) hold(each);
    }
  }
}

// An answer must be for what stood there when a person reached for it. So what waits no more keeps its place until the
// page is left, and where something moves, its buttons rest.

function settle(card) {
  if (card.classList.contains("settled")) return;
  card.classList.add("settled");
  for (const form of all("form", card)) form.inert = true;
  one(".meta", card)?.append(" · waits no more");
}
function hold(card) {
  const buttons = all("button", card).filter((each) => !each.disabled);
  for (const each of buttons) each.disabled = true;
  setTimeout(() => { for (const each of buttons) each.disabled = false; }, 700);
}

// A part that shows records of some kinds alone names them. The first event of a stream, and a change without a new
// record, concern every part.
function concerns(place, kinds) {
  return !place.dataset.kinds || !kinds.length || place.dataset.kinds.split(" ").some((each) => kinds.includes(each));
}

function listen() {
  const address = document.body.dataset.live;
  if (!address || source) return;
  source = new EventSource(address);
  source.addEventListener("change", (event) => {
    const { waiting, kinds } = JSON.parse(event.data);
    const badge = one("#waiting");
    if (badge) {
      badge.textContent = waiting || "";
      badge.setAttribute("aria-label", `${waiting} waiting`);
    }
    if (all("[data-swap]").some((place) => concerns(place, kinds))) refresh();
  });
  source.addEventListener("over", () => { source.close(); location.assign("/console/login"); });
  // A browser asks again by itself, but not where the answer was no stream.
  source.addEventListener("error", () => {
    if (source?.readyState !== EventSource.CLOSED) return;
    source = null;
    refresh();
    setTimeout(() => { if (!document.hidden) listen(); }, 10_000);
  });
}
function stop() { source?.close(); source = null; }
document.addEventListener("visibilitychange", () => (document.hidden ? stop() : listen()));
window.addEventListener("pagehide", stop);
// The page that comes after a form tells what became of it, once: this one must not ask for it first.
document.addEventListener("submit", stop);
listen();
// What no record tells of, such as the memory of a session, is looked at now and then.
const every = Number(one("[data-every]")?.dataset.every ?? 0);
if (every) setInterval(() => { if (!document.hidden) refresh(); }, every * 1000);

// ── Keyboard ──

const typing = (element) => element.matches("input, select, textarea") || element.isContentEditable;
let going = false;

function move(step) {
  const items = all("[data-item]");
  if (!items.length) return;
  const at = items.findIndex((each) => each === document.activeElement || each.contains(document.activeElement));
  const next = items[at < 0 ? (step > 0 ? 0 : items.length - 1) : Math.min(items.length - 1, Math.max(0, at + step))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}
function choose(name) {
  const item = document.activeElement.closest("[data-item]:not(.settled)");
  if (item) one(`[data-key-${name}]`, item)?.focus();
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing(document.activeElement)) {
    if (event.key === "Escape") document.activeElement.blur();
    return;
  }
  if (going) {
    going = false;
    // Of several that begin with the letter, the one after this page.
    const pages = all("nav a").filter((each) => each.textContent.trim().toLowerCase().startsWith(event.key));
    const page = pages[(pages.findIndex((each) => each.hasAttribute("aria-current")) + 1) % pages.length];
    if (page) { event.preventDefault(); page.click(); }
    return;
  }
  const act = {
    j: () => move(1),
    k: () => move(-1),
    a: () => choose("a"),
    d: () => choose("d"),
    g: () => { going = true; setTimeout(() => { going = false; }, 1500); },
    "/": () => one("[data-search]")?.focus(),
    Enter: () => {
      // A link and what opens by itself need no help.
      const item = document.activeElement;
      const link = item.matches("[data-item]:not(a, summary)") ? one("a", item) : null;
      if (!link) return false;
      link.click();
    },
  }[event.key];
  if (act && act() !== false) event.preventDefault();
});
