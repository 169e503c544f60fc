"use strict";
const root = document.documentElement;
const all = (selector) => [...document.querySelectorAll(selector)];

// The views: one for each GPU and type.
function show(name) {
  for (const view of all(".view")) view.hidden = view.dataset.view !== name;
  for (const button of all("[data-shows]")) button.setAttribute("aria-pressed", button.dataset.shows === name);
}
for (const button of all("[data-shows]")) button.addEventListener("click", () => show(button.dataset.shows));
if (all(".view").length) show(all(".view")[0].dataset.view);

// The theme: auto, light, dark. Some browsers give local files no storage.
const themes = ["auto", "light", "dark"];
const button = document.getElementById("theme");
const store = (action) => { try { return action(localStorage); } catch { return null; } };
function paint(theme) {
  button.textContent = theme;
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
}
paint(store((s) => s.getItem("flashladder-theme")) || "auto");
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(button.textContent) + 1) % themes.length];
  store((s) => s.setItem("flashladder-theme", next));
  paint(next);
});

// What a mark of a picture says when it is pointed at.
const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const mark = event.target.closest("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
});

// The filter of the runs: all of its words.
document.getElementById("filter")?.addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  for (const row of all("#runs tbody tr")) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
});
