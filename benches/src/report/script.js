"use strict";
(() => {
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);

  // Theme: as the system says, or as the reader says.
  const button = $("theme");
  const themes = ["auto", "light", "dark"];
  const remember = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
                     set: (theme) => { try { localStorage.setItem("theme", theme); } catch { /* file:// */ } } };
  const show = (theme) => {
    root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  show(themes.includes(remember.get()) ? remember.get() : "auto");
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
    show(next);
    remember.set(next);
  });

  // On a phone the contents start closed.
  const contents = $("contents");
  if (contents && matchMedia("(max-width: 64rem)").matches) contents.open = false;

  // Filters.
  const form = $("filters");
  if (!form) return;
  form.hidden = false;
  const apply = () => {
    const krate = $("by-crate").value;
    const verdict = $("by-verdict").value;
    for (const part of document.querySelectorAll("[data-crate]")) {
      part.hidden = krate !== "" && part.dataset.crate !== krate;
    }
    let shown = 0;
    for (const group of document.querySelectorAll("table.claims tbody")) {
      let open = 0;
      for (const row of group.querySelectorAll("tr.claim")) {
        row.hidden = verdict !== "" && row.dataset.verdict !== verdict;
        if (!row.hidden) open += 1;
      }
      if (open === 0) group.hidden = true;
      if (!group.hidden) shown += open;
    }
    const none = $("none");
    if (none) none.hidden = shown > 0;
  };
  form.addEventListener("change", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
})();
