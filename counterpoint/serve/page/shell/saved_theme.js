// Sets the chosen theme before the first paint, so that a dark page does not flash white. A classic script on purpose: modules
// run after the page is drawn. shell/theme.js changes the choice.
(() => {
  try {
    const theme = localStorage.getItem("theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch {
    // A browser that keeps nothing for us follows the system's theme.
  }
})();
