// Holdfast console: live parts, keys, palette, dialogs. Every page works without it.
(() => {
  "use strict";
  const $ = (s, e = document) => e.querySelector(s), $$ = (s, e = document) => [...e.querySelectorAll(s)];
  const body = document.body, prefix = body.dataset.prefix || "", main = $("#main");
  const listen = document.addEventListener.bind(document), enc = encodeURIComponent, stop = (e) => e.preventDefault(),
    make = document.createElement.bind(document);
  const cookie = (name, value) => {
    document.cookie = `holdfast_${name}=${enc(value)};path=/;max-age=31536000;samesite=strict` +
      (location.protocol === "https:" ? ";secure" : "");
  };

  // times
  const span = (s) => {
    if (s < 60) return `${Math.floor(s)} s`;
    const m = Math.floor(s / 60), h = Math.floor(m / 60), d = Math.floor(h / 24);
    return m < 60 ? `${m} min` : h < 48 ? `${h} h` : `${d} d`;
  };
  const ago = (at) => {
    const s = (Date.now() - at) / 1000;
    return Math.abs(s) < 1 ? "now" : s > 0 ? `${span(s)} ago` : `in ${span(-s)}`;
  };
  const tick = (root = document) => $$("time[data-ago]", root).forEach((t) => {
    const text = ago(Date.parse(t.dateTime));
    if (t.textContent !== text) t.textContent = text;
  });

  const wake = (root) => {
    tick(root);
    $$(".copy[hidden]", root).forEach((b) => { b.hidden = false; });
  };

  // copying
  const copy = async (text, button) => {
    try { await navigator.clipboard.writeText(text); } catch { return; }
    say("copied");
    if (button) { button.classList.add("done"); setTimeout(() => button.classList.remove("done"), 1200); }
  };
  let said = 0;
  const say = (text) => { $("#announce").textContent = text; };
  const sayCounts = () => {  // polite, and at most once in ten seconds
    const bad = $("[data-nav=failures] .n");
    if (bad && Date.now() - said > 10000) { said = Date.now(); say(`${bad.textContent} failed`); }
  };

  // live parts
  const toggle = $("[data-live-toggle]");
  let source = null, paused = false, at = 0, failures = 0, away = 0;
  const inUse = (part) => {
    const chosen = getSelection();
    return $(":focus,details[open],input:checked", part) ||
      (chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode));
  };
  const swap = (id, html) => {
    const part = document.getElementById(id);
    if (!part || part.dataset.live === undefined || inUse(part)) return;
    const current = $("[aria-current=page]", part)?.dataset.nav;
    part.innerHTML = html;
    if (current) $(`[data-nav="${current}"]`, part)?.setAttribute("aria-current", "page");
    wake(part);
    if (id === "nav-counts") { sayCounts(); $(".badge").textContent = $("[data-nav=failures] .n")?.textContent || ""; }
    if (id === "newest") countNew(part);
  };
  const countNew = (part) => {  // the rows stay where they are
    const link = $("a", part), n = link.dataset.places.split(" ").filter((p) => p > part.dataset.first).length;
    $("b", link).textContent = n < link.dataset.most ? n : `${n}+`;
    link.hidden = !n;
  };
  const showAge = () => {
    if (!toggle || !at) return;
    const age = Math.max(0, Date.now() / 1000 - at);
    $(".live-age", toggle).textContent = age < 1 ? "now" : `${span(age)} ago`;
    if (away) $(".away-age").textContent = span(age);
  };
  const setAway = (since) => {
    away = since;
    body.classList.toggle("is-away", !!since);
    $("#away").hidden = !since;
    $$("form[method=post] button").forEach((b) => { b.disabled = !!since; });
    showAge();
  };
  const open = () => {
    if (!main?.dataset.feed || source || paused || document.hidden) return;
    const feed = enc(main.dataset.feed);
    const parts = $$("[data-live]").map((e) => e.id).join(",");
    source = new EventSource(`${prefix}/live?feed=${feed}&parts=${parts}&version=${enc(main.dataset.version || "")}`);
    source.onmessage = async (event) => {
      failures = 0;
      const m = JSON.parse(event.data);
      if (m.away) setAway(m.away.since);
      else if (m.back) setAway(0);
      else if (m.at && main.dataset.again !== undefined) location.reload();
      else if (m.at) { at = m.at; if (away) setAway(0); showAge(); }
      else if (m.html !== undefined) swap(m.id, m.html);
      else if (m.fetch) {
        const answer = await fetch(`${prefix}/fragment?feed=${feed}&id=${enc(m.id)}`);
        if (answer.ok && !paused) swap(m.id, await answer.text());
      }
    };
    source.onerror = () => {
      if (source?.readyState !== EventSource.CLOSED) return;
      shut();
      failures += 1;
      setTimeout(open, Math.min(30000, 1000 * 2 ** failures));
    };
  };
  const shut = () => { source?.close(); source = null; main && (main.dataset.version = ""); };
  const pause = () => {
    paused = !paused;
    toggle?.setAttribute("aria-pressed", String(paused));
    if (toggle) $(".live-word", toggle).textContent = paused ? "Paused" : "Live";
    paused ? shut() : open();
  };
  if (toggle) {
    toggle.hidden = false;
    toggle.addEventListener("click", pause);
    listen("visibilitychange", () => document.hidden ? shut() : open());
    at = Date.now() / 1000;
    open();
  }
  setInterval(() => { if (!paused) tick(); showAge(); }, 2000);

  // theme and zone
  const theme = () => {
    const root = document.documentElement;
    const dark = root.dataset.theme === "dark" || root.dataset.theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    $("meta[name=color-scheme]").content = root.dataset.theme;
    cookie("theme", root.dataset.theme);
  };
  const zone = () => {
    cookie("zone", body.dataset.zone === "UTC" ? Intl.DateTimeFormat().resolvedOptions().timeZone : "UTC");
    location.reload();
  };

  const more = () => {
    const on = location.hash !== "#more";
    location.hash = on ? "more" : "main";
    (on ? $("#more [data-nav]") : $("[data-more]")).focus();
  };

  // dialogs
  let opener = null;
  const show = (dialog) => { opener = document.activeElement; dialog.showModal(); };
  listen("close", (e) => { if (e.target.tagName === "DIALOG") opener?.focus?.(); }, true);
  listen("click", (e) => {
    const on = (s) => e.target.closest(s);
    if (e.target.tagName === "DIALOG") e.target.close();
    else if (on("[data-copy]")) copy(on("[data-copy]").dataset.copy, on("[data-copy]"));
    else if (on("[data-help]")) show($("#help"));
    else if (on("[data-theme-switch]")) { stop(e); theme(); }
    else if (on("[data-zone-switch]")) { stop(e); zone(); }
    else if (on("[data-more]")) { stop(e); more(); }
    else if (on("[data-close]")) { const d = on("dialog"); if (d) { stop(e); d.close(); } }
  });
  // A dry run is a page of its own; with a script it is shown in a dialog.
  listen("submit", async (e) => {
    const form = e.target, button = e.submitter;
    if (form.method === "dialog") return;
    button?.setAttribute("aria-busy", "true");
    if (form.dataset.dialog === undefined) return;
    stop(e);
    const data = new URLSearchParams(new FormData(form, button));
    try {
      const address = button?.getAttribute("formaction") || form.getAttribute("action") || location.href;
      const answer = await fetch(address, { method: "POST", body: data });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const found = page.getElementById("confirm") || page.querySelector(".problem");
      let dialog = $("#dialog");
      if (!dialog) {
        dialog = make("dialog");
        dialog.id = "dialog"; dialog.className = "sheet";
        body.append(dialog);
      }
      dialog.setAttribute("aria-label", $("h1,h2", found)?.textContent || "Confirm");
      dialog.replaceChildren(document.importNode(found, true));
      wake(dialog);
      show(dialog);
      ($("[autofocus]", dialog) || $("button", dialog))?.focus();
    } catch { form.submit(); }
    finally { button?.removeAttribute("aria-busy"); }
  });

  // palette
  const palette = $("#palette"), results = $("#palette ul"), box = $("#palette input");
  let asked = 0, place = -1;
  const mark = (n) => {
    const items = $$("li", results);
    place = items.length ? (n + items.length) % items.length : -1;
    items.forEach((li, i) => li.classList.toggle("at", i === place));
    items[place]?.scrollIntoView({ block: "nearest" });
  };
  const ask = async () => {
    const mine = ++asked;
    const answer = await fetch(`${prefix}/palette?q=${enc(box.value.slice(0, 500))}`);
    if (!answer.ok || mine !== asked) return;
    results.replaceChildren(...(await answer.json()).map((r) => {
      const li = make("li"), a = make("a"), small = make("small");
      a.href = r.url; a.textContent = r.label; small.textContent = r.kind;
      li.setAttribute("role", "option");
      a.append(small); li.append(a);
      return li;
    }));
    mark(0);
  };
  const find = () => { if (!palette.open) { box.value = ""; show(palette); ask(); } };
  box?.addEventListener("input", () => { clearTimeout(find.timer); find.timer = setTimeout(ask, 120); });
  palette?.addEventListener("keydown", (e) => {
    if (e.key === "ArrowDown" || e.key === "ArrowUp") { stop(e); mark(place + (e.key === "ArrowDown" ? 1 : -1)); }
    if (e.key === "Enter" && place >= 0) { stop(e); $$("li a", results)[place].click(); }
  });

  // rows and keys
  let row = -1, lastChosen = -1;
  const rows = () => $$("[data-row]");
  const go = (n) => {
    const all = rows();
    if (!all.length) return;
    row = Math.min(all.length - 1, Math.max(0, n));
    all.forEach((r, i) => r.classList.toggle("at", i === row));
    ($("a", all[row]) || all[row]).focus();
    all[row].scrollIntoView({ block: "nearest" });
  };
  const choose = (n, on) => {
    const mark = $("input[type=checkbox]", rows()[n] || body);
    if (rows()[n] && mark) { mark.checked = on ?? !mark.checked; mark.dispatchEvent(new Event("change", { bubbles: true })); lastChosen = n; }
  };
  listen("change", (e) => {
    const form = e.target.closest("form[data-choose]");
    if (!form) return;
    const chosen = $$("input[name=chosen]:checked", form);
    const events = chosen.reduce((sum, c) => sum + Number(c.dataset.count || 1), 0);
    const bar = $(".bulk", form);
    bar.hidden = !chosen.length;
    $(".bulk-what", bar).textContent = `${chosen.length} chosen · exactly ${events.toLocaleString("en")} events`;
    $$("[data-n]", bar).forEach((b) => { b.textContent = events.toLocaleString("en"); });
  });
  $$("form[data-choose] .bulk").forEach((bar) => { bar.hidden = true; });
  const press = (selector) => { const found = $(selector, $("dialog[open]") || document); if (found) { found.focus(); found.click(); } return !!found; };
  let before = "";
  listen("keydown", (e) => {
    if ((e.ctrlKey || e.metaKey) && e.key.toLowerCase() === "k") { stop(e); find(); return; }
    if (e.ctrlKey || e.metaKey || e.altKey || body.dataset.keys === "off") return;
    const typing = e.target.matches("input:not([type=checkbox]),textarea,select");
    if (typing) { if (e.key === "Escape") e.target.blur(); return; }
    if ($("dialog[open]")) return;
    const was = before; before = "";
    if (was === "g") { const link = $(`[data-go="${CSS.escape(e.key)}"]`); if (link) { stop(e); link.click(); } return; }
    if (was === "*" && e.key === "a") { rows().forEach((_, i) => choose(i, true)); return; }
    const act = {
      g: () => { before = "g"; }, "*": () => { before = "*"; },
      "/": () => ($("[data-filter]") || $(".search input")).focus(),
      j: () => go(row + 1), k: () => go(row - 1), x: () => choose(Math.max(0, row)),
      X: () => { for (let i = Math.min(lastChosen, row); i <= Math.max(lastChosen, row); i++) choose(i, true); },
      " ": () => pause(), t: theme, z: zone, "?": () => show($("#help")),
      "[": () => press("[data-key='[']"), "]": () => press("[data-key=']']"),
      c: () => { const id = $("[data-id]"); if (id) copy(id.dataset.id); }, C: () => copy($(".cli code")?.textContent || ""),
    }[e.key];
    if (e.key === " " && (e.target.matches("button,a,summary,input") || !toggle)) return;
    if (e.key === "Escape" && location.hash === "#more") more();
    if (act) { stop(e); act(); }
    else if (/^[rdnepu]$/.test(e.key) && press(`[data-key=${e.key}]`)) stop(e);
  });

  wake(document);
})();
