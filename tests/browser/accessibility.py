"""Checks of a page in the browser that follow from WCAG 2.2 A and AA; returns what violates them.

Contrast is computed from the colours that the browser shows: text on the nearest opaque background, 4.5:1, or 3:1 for
large text, and for the outline of a focused element. Pseudo elements and images are not covered.
"""

CHECKS = r"""
() => {
  const found = [];
  const say = (rule, element) => found.push(`${rule}: ${element.outerHTML.slice(0, 160)}`);
  const shown = (element) => element.checkVisibility({checkVisibilityCSS: true});
  const numbers = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
  const luminance = (colour) => {
    const parts = numbers(colour).slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const contrast = (one, other) => {
    const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };
  const background = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      const alpha = numbers(colour)[3];
      if (colour !== "transparent" && (alpha === undefined || alpha === 1)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const named = (element) => (element.getAttribute("aria-label") || element.textContent || element.title || "").trim();
  for (const element of document.querySelectorAll("body *")) {
    if (!shown(element)) continue;
    const own = Array.from(element.childNodes).some((node) => node.nodeType === 3 && node.textContent.trim());
    if (own) {
      const style = getComputedStyle(element);
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      const ratio = contrast(style.color, background(element));
      if (ratio < (large ? 3 : 4.5)) say(`contrast ${ratio.toFixed(2)}`, element);
    }
    if (element.tabIndex > 0) say("order of focus", element);
    if (element.id && document.querySelectorAll(`[id="${CSS.escape(element.id)}"]`).length > 1) say("id", element);
  }
  for (const element of document.querySelectorAll("a[href], button")) {
    if (!shown(element)) continue;
    if (!named(element)) say("name", element);
    const box = element.getBoundingClientRect();
    const inline = getComputedStyle(element).display === "inline";
    if (!inline && (box.width < 24 || box.height < 24)) say(`target ${box.width}x${box.height}`, element);
  }
  for (const element of document.querySelectorAll("input:not([type=hidden]), select")) {
    if (!element.labels || !element.labels.length) say("label", element);
  }
  for (const table of document.querySelectorAll("table")) {
    if (!table.caption) say("caption", table);
    for (const head of table.querySelectorAll("th")) if (!head.scope) say("scope", head);
  }
  for (const element of document.querySelectorAll(".scroll, pre")) {
    if (element.scrollWidth > element.clientWidth && element.tabIndex < 0) say("scrolls without keyboard", element);
  }
  if (!document.documentElement.lang) say("lang", document.documentElement);
  if (!document.title) say("title", document.documentElement);
  if (document.querySelectorAll("main").length !== 1) say("main", document.body);
  if (document.querySelectorAll("h1").length !== 1) say("h1", document.body);
  const updated = document.querySelector("script") !== null;
  if (document.querySelectorAll("[aria-live]").length !== (updated ? 1 : 0)) say("live regions", document.body);
  return found;
}
"""
