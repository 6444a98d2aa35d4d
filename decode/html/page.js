"use strict";
// The theme: the system's until the button is pressed.
(() => {
  const root = document.documentElement, button = document.querySelector(".theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const say = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to the ${dark() ? "light" : "dark"} theme`); };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
  say();
})();
