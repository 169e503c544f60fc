// Tooltips of the glossary's words, and a keyboard for what furo leaves to the mouse.
"use strict";

const tip = document.createElement("div");
tip.id = "meaning";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

const show = (link) => {
  tip.textContent = link.dataset.meaning;
  tip.hidden = false;
  const word = link.getBoundingClientRect();
  const left = Math.min(word.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = word.bottom + tip.offsetHeight + 8 > innerHeight;
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${(above ? word.top - tip.offsetHeight - 6 : word.bottom + 6) + scrollY}px`;
};
const hide = () => { tip.hidden = true; };

for (const link of document.querySelectorAll('article a[title][href*="#"]')) {
  link.dataset.meaning = link.title;
  link.removeAttribute("title");
  link.setAttribute("aria-describedby", tip.id);
  for (const event of ["mouseenter", "focus"]) link.addEventListener(event, () => show(link));
  for (const event of ["mouseleave", "blur"]) link.addEventListener(event, hide);
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

// Labels of hidden check boxes open the side and its branches.
for (const label of document.querySelectorAll("label[for]")) {
  const box = document.getElementById(label.htmlFor);
  if (!box || box.type !== "checkbox" || label.classList.contains("overlay")) continue;
  label.tabIndex = 0;
  label.setAttribute("role", "button");
  const say = () => label.setAttribute("aria-expanded", box.checked);
  box.addEventListener("change", say);
  say();
  label.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    box.click();
  });
}
