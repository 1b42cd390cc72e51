// Before the first paint: the reader's theme, if one was chosen. Without one the system's applies.
try {
  const theme = localStorage.getItem("tinyvllm.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is blocked: the system's theme it is.
}
